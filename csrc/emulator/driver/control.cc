// The emulator's own C interface: what a test or a user sets and reads besides the driver API.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>

#include "cuda_api.h"
#include "device.h"

namespace jax_fa4::emulator {

// The size of the text and, as far as it fits, the text with a closing zero.
static size_t copy_text(const std::string& text, char* to, size_t room) {
  if (to != nullptr && room > 0) {
    const size_t bytes = std::min(text.size(), room - 1);
    std::memcpy(to, text.data(), bytes);
    to[bytes] = '\0';
  }
  return text.size();
}

EMULATOR_EXPORT int jax_fa4_emulator_set_option(const char* name, int64_t value) {
  Options options = Device::get().options();
  const std::string key = name == nullptr ? "" : name;
  if (key == "seed")
    options.seed = static_cast<uint64_t>(value);
  else if (key == "architecture" && (value == 90 || value == 100 || value == 103))
    options.architecture = static_cast<int>(value);
  else if (key == "sm_count" && value >= 1 && value <= 1024)
    options.sm_count = static_cast<int>(value);
  else if (key == "threads" && value >= 0 && value <= 256)
    options.threads = static_cast<int>(value);
  else if (key == "completion" && value >= 0 && value <= 2)
    options.completion = static_cast<Completion>(value);
  else if (key == "check_races")
    options.check_races = value != 0;
  else if (key == "check_uninitialized")
    options.check_uninitialized = value != 0;
  else if (key == "check_registers")
    options.check_registers = value != 0;
  else if (key == "check_exit_reads")
    options.check_exit_reads = value != 0;
  else if (key == "check_tensor_fences")
    options.check_tensor_fences = value != 0;
  else if (key == "stuck_after" && value >= 1000)
    options.stuck_after = static_cast<uint64_t>(value);
  else
    return failure(Status::invalid_value,
                   ("the emulator has no option '" + key + "' that takes " + std::to_string(value)).c_str());
  Device::get().set_options(options);
  return 0;
}

// Options are of the process; a thread that loads kernels may choose the architecture for itself (0: the option's).
EMULATOR_EXPORT void jax_fa4_emulator_use_architecture(int architecture) { Device::use_architecture(architecture); }

EMULATOR_EXPORT int jax_fa4_emulator_register_ptx(const void* image, size_t bytes, const char* ptx) {
  if (image == nullptr || ptx == nullptr || bytes == 0)
    return failure(Status::invalid_value, "register_ptx: the image or the text is empty");
  return guarded([&] { Device::get().register_ptx(image, bytes, ptx); });
}

// Memory of somebody else that kernels may touch.
EMULATOR_EXPORT void jax_fa4_emulator_add_memory(const void* address, size_t bytes) {
  Device::get().memory.add(address, bytes);
}
EMULATOR_EXPORT void jax_fa4_emulator_remove_memory(const void* address) { Device::get().memory.remove(address); }

EMULATOR_EXPORT size_t jax_fa4_emulator_last_error(char* text, size_t room) {
  return copy_text(Device::get().last_error(), text, room);
}
EMULATOR_EXPORT void jax_fa4_emulator_clear_error() { Device::get().set_last_error(""); }
// JSON of the launches since the last time: a call without `text` takes it and gives its size, the next call copies it.
EMULATOR_EXPORT size_t jax_fa4_emulator_take_statistics(char* text, size_t room) {
  static std::mutex mutex;
  static std::string pending;
  std::lock_guard lock(mutex);
  if (text == nullptr) pending = Device::get().take_statistics();
  return copy_text(pending, text, room);
}

}  // namespace jax_fa4::emulator

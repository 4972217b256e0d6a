// A driver library without a GPU: has the driver API's names, records what is called with what, and fails where it is
// told to.
//
// An image is either the text "STUB entry=<name> params=<bytes>,<bytes>...", or PTX, whose entry and parameters are
// read. A kernel called `fill` (pointer, int32 count, float value) does what its name says; all others only leave a
// line in the log.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "runtime/driver_api.h"

using namespace jax_fa4::driver_api;

namespace {

struct StubKernel {
  std::string entry;
  std::vector<std::size_t> parameter_bytes;
  std::vector<std::size_t> parameter_offsets;
};

struct Injected {
  int result = 0;
  int calls_before = 0;
};

struct State {
  std::mutex mutex;
  std::vector<std::string> log;
  std::map<std::string, int> counts;
  std::map<std::string, Injected> injected;
  int major = 9, minor = 0, devices = 2;
};

State& TheState() {
  static auto* state = new State;
  return *state;
}

int contexts[8];  // a context is the address of its device's element
thread_local Context current = nullptr;

Context ContextOf(int device) { return reinterpret_cast<Context>(&contexts[device]); }

// Counts and records a call; returns the result that was injected for it.
Result Enter(const char* function, const std::string& details = "") {
  State& state = TheState();
  std::lock_guard lock(state.mutex);
  ++state.counts[function];
  state.log.push_back(std::string(function) + (details.empty() ? "" : " ") + details);
  auto found = state.injected.find(function);
  if (found == state.injected.end()) return kSuccess;
  if (found->second.calls_before-- > 0) return kSuccess;
  const Result result = found->second.result;
  state.injected.erase(found);
  return result;
}

void AddParameter(StubKernel* kernel, std::size_t bytes, std::size_t alignment) {
  const std::size_t end =
      kernel->parameter_bytes.empty() ? 0 : kernel->parameter_offsets.back() + kernel->parameter_bytes.back();
  kernel->parameter_offsets.push_back((end + alignment - 1) / alignment * alignment);
  kernel->parameter_bytes.push_back(bytes);
}

StubKernel* ParseStub(const char* image) {
  char entry[256] = "", parameters[1024] = "";
  if (std::sscanf(image, "STUB entry=%255s params=%1023s", entry, parameters) < 1) return nullptr;
  auto* kernel = new StubKernel{entry, {}, {}};
  std::istringstream stream(parameters);
  for (std::string text; std::getline(stream, text, ',');) {
    const std::size_t bytes = std::stoul(text);
    AddParameter(kernel, bytes, bytes == 128 ? 64 : bytes % 8 == 0 ? 8 : 4);
  }
  return kernel;
}

StubKernel* ParsePtx(const std::string& text) {
  const std::size_t begin = text.find(".entry ");
  if (begin == std::string::npos) return nullptr;
  const std::size_t open = text.find('(', begin), close = text.find(')', begin);
  auto* kernel = new StubKernel{text.substr(begin + 7, open - begin - 7), {}, {}};
  for (std::size_t at = text.find(".param .", open); at < close; at = text.find(".param .", at + 1)) {
    const std::size_t bytes = text.compare(at + 9, 2, "64") == 0 ? 8 : 4;
    AddParameter(kernel, bytes, bytes);
  }
  return kernel;
}

void Fill(void** parameters) {
  float* to;
  int count;
  float value;
  std::memcpy(&to, parameters[0], sizeof(to));
  std::memcpy(&count, parameters[1], sizeof(count));
  std::memcpy(&value, parameters[2], sizeof(value));
  std::fill(to, to + count, value);
}

std::string Hex(const void* data, std::size_t bytes) {
  std::string text;
  char two[3];
  for (std::size_t i = 0; i < bytes; ++i) {
    std::snprintf(two, sizeof(two), "%02x", static_cast<const unsigned char*>(data)[i]);
    text += two;
  }
  return text;
}

}  // namespace

extern "C" {

// ---- the tests' side

void stub_reset(int major, int minor, int devices) {
  State& state = TheState();
  std::lock_guard lock(state.mutex);
  state.log.clear();
  state.counts.clear();
  state.injected.clear();
  state.major = major;
  state.minor = minor;
  state.devices = devices;
}

void stub_fail(const char* function, int result, int calls_before) {
  State& state = TheState();
  std::lock_guard lock(state.mutex);
  state.injected[function] = {result, calls_before};
}

int stub_count(const char* function) {
  State& state = TheState();
  std::lock_guard lock(state.mutex);
  return state.counts[function];
}

// The log, a line per call, into `to`; returns the bytes it needs, the final zero included.
std::size_t stub_log(char* to, std::size_t bytes) {
  State& state = TheState();
  std::lock_guard lock(state.mutex);
  std::string text;
  for (const std::string& line : state.log) text += line + "\n";
  if (bytes > text.size()) std::memcpy(to, text.c_str(), text.size() + 1);
  return text.size() + 1;
}

// ---- the driver's side

Result cuInit(unsigned) { return Enter("cuInit"); }

Result cuGetErrorName(Result result, const char** name) {
  *name = result == 200   ? "CUDA_ERROR_INVALID_IMAGE"
          : result == 719 ? "CUDA_ERROR_LAUNCH_FAILED"
          : result == 1   ? "CUDA_ERROR_INVALID_VALUE"
                          : nullptr;
  return *name ? kSuccess : 1;
}

Result cuGetErrorString(Result result, const char** text) {
  *text = result == 200 ? "device kernel image is invalid" : "a text of the stub";
  return kSuccess;
}

Result cuDeviceGetCount(int* count) {
  *count = TheState().devices;
  return Enter("cuDeviceGetCount");
}

Result cuDeviceGet(Device* device, int ordinal) {
  *device = ordinal;
  return Enter("cuDeviceGet");
}

Result cuDeviceGetName(char* name, int bytes, Device device) {
  std::snprintf(name, bytes, "Stub %d", device);
  return Enter("cuDeviceGetName");
}

Result cuDeviceGetAttribute(int* value, int attribute, Device) {
  if (attribute == kDeviceComputeCapabilityMajor) *value = TheState().major;
  if (attribute == kDeviceComputeCapabilityMinor) *value = TheState().minor;
  return Enter("cuDeviceGetAttribute");
}

Result cuDevicePrimaryCtxRetain(Context* context, Device device) {
  *context = ContextOf(device);
  return Enter("cuDevicePrimaryCtxRetain");
}

Result cuCtxGetCurrent(Context* context) {
  *context = current;
  return kSuccess;
}

Result cuCtxSetCurrent(Context context) {
  current = context;
  return kSuccess;
}

Result cuCtxGetDevice(Device* device) {
  if (current == nullptr) return 201;
  *device = static_cast<Device>(reinterpret_cast<int*>(current) - contexts);
  return kSuccess;
}

Result cuLibraryLoadData(Library* library, const void* image, int*, void**, unsigned, int*, void**, unsigned) {
  if (Result result = Enter("cuLibraryLoadData")) return result;
  const char* text = static_cast<const char*>(image);
  StubKernel* kernel = std::strncmp(text, "STUB ", 5) == 0 ? ParseStub(text) : ParsePtx(text);
  if (kernel == nullptr) return 200;
  *library = reinterpret_cast<Library>(kernel);
  return kSuccess;
}

Result cuLibraryUnload(Library library) {
  delete reinterpret_cast<StubKernel*>(library);
  return Enter("cuLibraryUnload");
}

Result cuLibraryGetKernel(Kernel* kernel, Library library, const char* name) {
  if (Result result = Enter("cuLibraryGetKernel", name)) return result;
  *kernel = reinterpret_cast<Kernel>(library);
  return reinterpret_cast<StubKernel*>(library)->entry == name ? kSuccess : 500;
}

Result cuKernelGetFunction(Function* function, Kernel kernel) {
  *function = reinterpret_cast<Function>(kernel);
  return Enter("cuKernelGetFunction");
}

Result cuKernelGetParamInfo(Kernel kernel, std::size_t index, std::size_t* offset, std::size_t* bytes) {
  const auto* stub = reinterpret_cast<const StubKernel*>(kernel);
  if (index >= stub->parameter_bytes.size()) return 1;
  *offset = stub->parameter_offsets[index];
  *bytes = stub->parameter_bytes[index];
  return kSuccess;
}

Result cuFuncSetAttribute(Function, int attribute, int value) {
  return Enter("cuFuncSetAttribute", std::to_string(attribute) + " " + std::to_string(value));
}

Result cuStreamSynchronize(Stream) { return Enter("cuStreamSynchronize"); }

#ifdef STUB_WITHOUT_LAUNCH  // as if of a driver that is too old
#define cuLaunchKernelEx cuLaunchKernelExMissing
#endif
Result cuLaunchKernelEx(const LaunchConfig* config, Function function, void** parameters, void**) {
  const auto* kernel = reinterpret_cast<const StubKernel*>(function);
  std::ostringstream text;
  text << kernel->entry << " device=" << (reinterpret_cast<int*>(current) - contexts) << " grid=" << config->grid[0]
       << "," << config->grid[1] << "," << config->grid[2] << " block=" << config->block[0]
       << " shared=" << config->dynamic_shared_bytes << " stream=" << config->stream;
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    const LaunchAttribute& attribute = config->attributes[i];
    text << " attribute=" << attribute.id << ":" << attribute.value.words[0];
  }
  for (std::size_t i = 0; i < kernel->parameter_bytes.size(); ++i) {
    text << " " << Hex(parameters[i], kernel->parameter_bytes[i]);
  }
  if (Result result = Enter("cuLaunchKernelEx", text.str())) return result;
  if (kernel->entry == "fill") Fill(parameters);
  return kSuccess;
}

}  // extern "C"

// Unpacks what XLA hands over and calls the runtime; knows nothing of any kernel.
//
// A call carries: operands and results; driver (a declared driver's name); kernel (a binary's content hash); integers
// and floats (the values that the binary's recipe refers to by position).
#include "ffi/launch_handlers.h"

#include <array>
#include <cstdint>
#include <string_view>

#include "runtime/launcher.h"
#include "runtime/registry.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jax_fa4 {
namespace {

using Integers = ffi::Span<const std::int64_t>;
using Floats = ffi::Span<const float>;

ffi::Error Unpack(const ffi::RemainingArgs& arguments, const ffi::RemainingRets& returns, const Integers& integers,
                  const Floats& floats, std::array<driver_api::DevicePointer, kMaxParameters>* addresses,
                  CallValues* values) {
  if (arguments.size() + returns.size() > addresses->size()) {
    return ffi::Error::InvalidArgument("jax_fa4: the call has more operands and results than a kernel can take");
  }
  std::size_t count = 0;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    ffi::ErrorOr<ffi::AnyBuffer> buffer = arguments.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    (*addresses)[count++] = reinterpret_cast<driver_api::DevicePointer>(buffer->untyped_data());
  }
  for (std::size_t i = 0; i < returns.size(); ++i) {
    ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> buffer = returns.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    (*addresses)[count++] = reinterpret_cast<driver_api::DevicePointer>((*buffer)->untyped_data());
  }
  *values = {addresses->data(), arguments.size(), addresses->data() + arguments.size(),
             returns.size(),    integers.begin(), integers.size(),
             floats.begin(),    floats.size()};
  return ffi::Error::Success();
}

// Tells an emulated GPU which buffers of XLA's a launch may touch, for the time of the launch.
class SharedBuffers {
 public:
  SharedBuffers(const Driver& driver, const ffi::RemainingArgs& arguments, const ffi::RemainingRets& returns)
      : driver_(driver) {
    if (driver_.emulator_add_memory == nullptr || driver_.emulator_remove_memory == nullptr) return;
    for (std::size_t i = 0; i < arguments.size(); ++i) Add(*arguments.get<ffi::AnyBuffer>(i));
    for (std::size_t i = 0; i < returns.size(); ++i) Add(**returns.get<ffi::AnyBuffer>(i));
  }
  ~SharedBuffers() {
    for (std::size_t i = 0; i < count_; ++i) driver_.emulator_remove_memory(addresses_[i]);
  }
  SharedBuffers(const SharedBuffers&) = delete;
  SharedBuffers& operator=(const SharedBuffers&) = delete;

 private:
  void Add(ffi::AnyBuffer buffer) {
    driver_.emulator_add_memory(buffer.untyped_data(), buffer.size_bytes());
    addresses_[count_++] = buffer.untyped_data();
  }

  const Driver& driver_;
  std::array<const void*, kMaxParameters> addresses_{};
  std::size_t count_ = 0;
};

// Runs `body`, turning the runtime's exceptions into XLA's errors.
template <typename Body>
ffi::Error Guarded(Body body) {
  try {
    return body();
  } catch (const std::exception& failure) {
    return ffi::Error::Internal(std::string("jax_fa4: ") + failure.what());
  }
}

// A call that came to the other platform than it was traced for must not be launched: a GPU's kernels would get the
// host's addresses, the emulator a GPU's.
constexpr std::string_view kCudaDriver = "cuda";

Driver& DriverOfGpu(std::string_view name) {
  Driver& driver = FindDriver(name);
  if (driver.emulator_add_memory == nullptr) return driver;
  throw RuntimeFailure("The emulated GPU '" + driver.name() +
                       "' runs on JAX's CPU platform only. Put the arrays on a CPU device, or choose another "
                       "implementation.");
}

Driver& DriverOfHost(std::string_view name) {
  if (name != kCudaDriver) return FindDriver(name);
  throw RuntimeFailure(
      "A call that was traced for a GPU is executed on the CPU. Trace it under jax_fa4.target('cpu'), or put the "
      "arrays "
      "on the GPU.");
}

ffi::Error Initialize(std::int32_t ordinal, ffi::RemainingArgs, ffi::RemainingRets, std::string_view driver,
                      std::string_view kernel, Integers, Floats) {
  return Guarded([&] {
    Load(DriverOfGpu(driver), kernel, ordinal);
    return ffi::Error::Success();
  });
}

ffi::Error LaunchOnCuda(std::int32_t ordinal, driver_api::Stream stream, ffi::RemainingArgs arguments,
                        ffi::RemainingRets returns, std::string_view driver, std::string_view kernel, Integers integers,
                        Floats floats) {
  return Guarded([&] {
    std::array<driver_api::DevicePointer, kMaxParameters> addresses;
    CallValues values;
    if (ffi::Error error = Unpack(arguments, returns, integers, floats, &addresses, &values); error.failure()) {
      return error;
    }
    Launch(FindLoaded(FindDriver(driver), kernel, ordinal), values, stream);
    return ffi::Error::Success();
  });
}

ffi::Error LaunchOnHost(std::int32_t ordinal, ffi::RemainingArgs arguments, ffi::RemainingRets returns,
                        std::string_view driver, std::string_view kernel, Integers integers, Floats floats) {
  return Guarded([&] {
    std::array<driver_api::DevicePointer, kMaxParameters> addresses;
    CallValues values;
    if (ffi::Error error = Unpack(arguments, returns, integers, floats, &addresses, &values); error.failure()) {
      return error;
    }
    const LoadedKernel& loaded = Load(DriverOfHost(driver), kernel, ordinal);
    SharedBuffers shared(*loaded.driver, arguments, returns);
    Launch(loaded, values, nullptr);
    ScopedContext scope(*loaded.driver, loaded.context);
    const driver_api::Result result = loaded.driver->stream_synchronize(nullptr);
    if (result != driver_api::kSuccess) {
      throw RuntimeFailure("Kernel '" + loaded.binary->name + "' failed on " + loaded.device + ": " +
                           loaded.driver->Describe(result) + ".");
    }
    return ffi::Error::Success();
  });
}

// The attributes, the same for all handlers.
template <typename Binding>
auto WithCall(Binding binding) {
  return std::move(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<std::string_view>("driver")
      .template Attr<std::string_view>("kernel")
      .template Attr<Integers>("integers")
      .template Attr<Floats>("floats");
}

}  // namespace
}  // namespace jax_fa4

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFa4Initialize, jax_fa4::Initialize,
                              jax_fa4::WithCall(ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>()),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFa4LaunchOnCuda, jax_fa4::LaunchOnCuda,
                              jax_fa4::WithCall(ffi::Ffi::Bind()
                                                    .Ctx<ffi::DeviceOrdinal>()
                                                    .Ctx<ffi::PlatformStream<jax_fa4::driver_api::Stream>>()),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFa4LaunchOnHost, jax_fa4::LaunchOnHost,
                              jax_fa4::WithCall(ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>()));

// The two custom-call targets that XLA sees; every kernel is launched through them.
#pragma once

#include "xla/ffi/api/c_api.h"

extern "C" {
// Loads the kernel that the call names, on the device that will execute it.
XLA_FFI_Error* JaxFa4Initialize(XLA_FFI_CallFrame* frame);
// Launches on XLA's stream; may be captured into a command buffer.
XLA_FFI_Error* JaxFa4LaunchOnCuda(XLA_FFI_CallFrame* frame);
// The CPU platform has neither a stream nor, in all versions, an initialise stage: loads at first use, launches and
// waits.
XLA_FFI_Error* JaxFa4LaunchOnHost(XLA_FFI_CallFrame* frame);
}

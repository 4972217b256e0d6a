// The Python door: declares drivers, registers binaries, hands XLA's handlers out, and opens the parts of the runtime
// that tests and tools look at one by one.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/launch_handlers.h"
#include "runtime/driver.h"
#include "runtime/launcher.h"
#include "runtime/registry.h"
#include "runtime/tensor_map.h"
#include "xla/ffi/api/c_api.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace jax_fa4 {
namespace {

using Addresses = std::vector<driver_api::DevicePointer>;

std::string Text(const nb::bytes& bytes) { return std::string(bytes.c_str(), bytes.size()); }

CallValues ValuesOf(const Addresses& operands, const Addresses& results, const std::vector<std::int64_t>& integers,
                    const std::vector<float>& floats) {
  return {operands.data(), operands.size(), results.data(), results.size(),
          integers.data(), integers.size(), floats.data(),  floats.size()};
}

void BindRecipe(nb::module_& module) {
  nb::enum_<ParameterKind>(module, "ParameterKind")
      .value("OPERAND", ParameterKind::kOperand)
      .value("RESULT", ParameterKind::kResult)
      .value("INT32", ParameterKind::kInt32)
      .value("INT64", ParameterKind::kInt64)
      .value("FLOAT32", ParameterKind::kFloat32)
      .value("DIVISOR", ParameterKind::kDivisor)
      .value("TENSOR_MAP", ParameterKind::kTensorMap);
  nb::enum_<ElementType>(module, "ElementType")
      .value("UINT8", ElementType::kUint8)
      .value("INT32", ElementType::kInt32)
      .value("FLOAT16", ElementType::kFloat16)
      .value("BFLOAT16", ElementType::kBfloat16)
      .value("FLOAT32", ElementType::kFloat32)
      .value("TFLOAT32", ElementType::kTfloat32);
  nb::class_<TensorMapRecipe>(module, "TensorMapRecipe")
      .def(
          "__init__",
          [](TensorMapRecipe* self, bool is_result, std::uint32_t buffer, ElementType element,
             std::vector<std::uint32_t> extents, std::vector<std::uint32_t> strides, std::vector<std::uint32_t> box,
             int swizzle, int l2) {
            if (swizzle < 0 || swizzle > 3 || l2 < 0 || l2 > 3) throw RuntimeFailure("swizzle and l2 take 0 to 3.");
            new (self) TensorMapRecipe{is_result,          buffer,         element,          std::move(extents),
                                       std::move(strides), std::move(box), Swizzle(swizzle), L2Promotion(l2)};
          },
          "is_result"_a, "buffer"_a, "element"_a, "extents"_a, "strides"_a, "box"_a, "swizzle"_a, "l2"_a);
  nb::class_<LaunchRecipe>(module, "LaunchRecipe")
      .def(nb::init<>())
      .def("add_parameter", [](LaunchRecipe& self, ParameterKind kind, std::uint32_t index, std::uint32_t offset,
                               std::uint32_t bytes) { self.parameters.push_back({kind, index, offset, bytes}); })
      .def("add_tensor_map", [](LaunchRecipe& self, const TensorMapRecipe& map) { self.tensor_maps.push_back(map); })
      .def_rw("operand_count", &LaunchRecipe::operand_count)
      .def_rw("result_count", &LaunchRecipe::result_count)
      .def_rw("integer_count", &LaunchRecipe::integer_count)
      .def_rw("float_count", &LaunchRecipe::float_count)
      .def_rw("grid", &LaunchRecipe::grid)
      .def_rw("block", &LaunchRecipe::block)
      .def_rw("cluster", &LaunchRecipe::cluster)
      .def_rw("dynamic_shared_bytes", &LaunchRecipe::dynamic_shared_bytes)
      .def_rw("programmatic_launch", &LaunchRecipe::programmatic_launch);
}

void BindRegistry(nb::module_& module) {
  module.def(
      "register_binary",
      [](std::string hash, std::string name, std::string entry, nb::bytes cubin, nb::bytes ptx,
         std::string architecture, int major, int minor, bool family, std::string alternatives,
         const LaunchRecipe& recipe) {
        RegisterBinary({std::move(hash),
                        std::move(name),
                        std::move(entry),
                        Text(cubin),
                        Text(ptx),
                        {std::move(architecture), {major, minor}, family},
                        std::move(alternatives),
                        recipe});
      },
      "hash"_a, "name"_a, "entry"_a, "cubin"_a, "ptx"_a, "architecture"_a, "major"_a, "minor"_a, "family"_a,
      "alternatives"_a, "recipe"_a);
  module.def(
      "set_binary_finder",
      [](nb::callable finder) {
        // Leaked on purpose: a call may outlive the interpreter's wish to see it go.
        auto* kept = new nb::object(std::move(finder));
        SetBinaryFinder([kept](const std::string& hash) {
          nb::gil_scoped_acquire gil;
          try {
            (*kept)(hash);
          } catch (nb::python_error& error) {
            throw RuntimeFailure("Looking for the kernel with content hash '" + hash + "' failed: " + error.what());
          }
        });
      },
      "finder"_a);
  module.def("is_registered", [](const std::string& hash) { return IsRegistered(hash); }, "hash"_a);
  module.def(
      "declare_driver",
      [](const std::string& name, const std::string& path, bool takes_ptx, int major, int minor) {
        DeclareDriver(name, path, takes_ptx ? ImageKind::kPtx : ImageKind::kCubin, {major, minor});
      },
      "name"_a, "path"_a, "takes_ptx"_a, "major"_a = 0, "minor"_a = 0);
  module.def(
      "load",
      [](const std::string& driver, const std::string& hash, int ordinal) {
        return Load(FindDriver(driver), hash, ordinal).device;
      },
      "driver"_a, "hash"_a, "ordinal"_a, nb::call_guard<nb::gil_scoped_release>());
  module.def(
      "launch",
      [](const std::string& driver, const std::string& hash, int ordinal, const Addresses& operands,
         const Addresses& results, const std::vector<std::int64_t>& integers, const std::vector<float>& floats,
         std::uint64_t stream) {
        Launch(FindLoaded(FindDriver(driver), hash, ordinal), ValuesOf(operands, results, integers, floats),
               reinterpret_cast<driver_api::Stream>(stream));
      },
      "driver"_a, "hash"_a, "ordinal"_a, "operands"_a, "results"_a, "integers"_a, "floats"_a, "stream"_a,
      nb::call_guard<nb::gil_scoped_release>());
}

void BindParts(nb::module_& module) {
  module.def(
      "parameter_block",
      [](const LaunchRecipe& recipe, const Addresses& operands, const Addresses& results,
         const std::vector<std::int64_t>& integers, const std::vector<float>& floats) {
        ParameterBlock block;
        FillParameters(recipe, ValuesOf(operands, results, integers, floats), &block);
        return nb::bytes(reinterpret_cast<const char*>(block.bytes.data()), block.size);
      },
      "recipe"_a, "operands"_a, "results"_a, "integers"_a, "floats"_a);
  module.def(
      "tensor_map_words",
      [](const TensorMapRecipe& recipe, std::uint64_t address, const std::vector<std::int64_t>& integers,
         const std::string& through_driver) {
        CheckRecipe(recipe);
        const TensorMapValues values = GatherValues(recipe, address, integers.data());
        driver_api::TensorMapWords map{};
        if (through_driver.empty()) {
          EncodeTensorMap(recipe, values, &map);
        } else {
          EncodeTensorMapWithDriver(FindDriver(through_driver), recipe, values, &map);
        }
        return std::vector<std::uint64_t>(map.words, map.words + 16);
      },
      "recipe"_a, "address"_a, "integers"_a, "through_driver"_a = "");
  module.def("divisor", [](std::uint32_t divisor) {
    const Divisor made = MakeDivisor(divisor);
    return nb::make_tuple(made.divisor, made.multiplier, made.shift1, made.shift2);
  });
}

nb::capsule HandlerOf(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

}  // namespace
}  // namespace jax_fa4

NB_MODULE(_native, module) {
  module.doc() = "The compiled part of jax_fa4: drivers, kernel registry, launcher and XLA handlers.";
  jax_fa4::BindRecipe(module);
  // What of XLA's interface the handlers were built for; an older framework refuses them, and with them all of JAX.
  module.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  jax_fa4::BindRegistry(module);
  jax_fa4::BindParts(module);
  module.def("handler", [](const std::string& name) {
    if (name == "initialize") return jax_fa4::HandlerOf(JaxFa4Initialize);
    if (name == "launch_on_cuda") return jax_fa4::HandlerOf(JaxFa4LaunchOnCuda);
    if (name == "launch_on_host") return jax_fa4::HandlerOf(JaxFa4LaunchOnHost);
    throw jax_fa4::RuntimeFailure("There is no handler '" + name + "'.");
  });
}

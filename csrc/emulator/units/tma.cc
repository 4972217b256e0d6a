// TMA: checks, fill, conversion on the way in, reductions.
#include "tma.h"

#include <type_traits>

#include "formats.h"

namespace jax_fa4::emulator {
namespace detail {

InnerRange inner_range(const TensorMap& map, int32_t coordinate) {
  const int64_t box = map.box[0];
  const int64_t first = std::clamp<int64_t>(-int64_t{coordinate}, 0, box);
  const int64_t last = std::clamp<int64_t>(static_cast<int64_t>(map.extent[0]) - coordinate, first, box);
  return {static_cast<uint32_t>(first), static_cast<uint32_t>(last)};
}

uint32_t swizzle_atom(Swizzle swizzle) {
  switch (swizzle) {
    case Swizzle::none:
      return 0;
    case Swizzle::bytes128_atom32:
      return 32;
    case Swizzle::bytes128_atom32_flip8:
      return 8;
    case Swizzle::bytes128_atom64:
      return 64;
    default:
      return 16;
  }
}

}  // namespace detail

namespace {

template <class Number>
Number load(const void* source) {
  Number value;
  std::memcpy(&value, source, sizeof value);
  return value;
}

// Calls update(destination element, source element) -> new element over arrays that need not be aligned.
template <class Number, class Update>
void update_elements(void* destination, const void* source, uint32_t bytes, Update&& update) {
  auto* to = static_cast<uint8_t*>(destination);
  const auto* from = static_cast<const uint8_t*>(source);
  for (uint32_t at = 0; at + sizeof(Number) <= bytes; at += sizeof(Number)) {
    const Number result = update(load<Number>(to + at), load<Number>(from + at));
    std::memcpy(to + at, &result, sizeof result);
  }
}

template <class Number>
Number combine(Reduction reduction, Number old, Number operand) {
  using Bits = std::make_unsigned_t<Number>;
  switch (reduction) {
    case Reduction::add:
      return static_cast<Number>(static_cast<Bits>(old) + static_cast<Bits>(operand));
    case Reduction::min:
      return std::min(old, operand);
    case Reduction::max:
      return std::max(old, operand);
    case Reduction::inc:
      return old >= operand ? Number{0} : static_cast<Number>(old + 1);
    case Reduction::dec:
      return old == 0 || old > operand ? operand : static_cast<Number>(old - 1);
    case Reduction::bit_and:
      return old & operand;
    case Reduction::bit_or:
      return old | operand;
    case Reduction::bit_xor:
      return old ^ operand;
  }
  return old;
}

template <class Number>
void reduce_integers(Reduction reduction, void* destination, const void* source, uint32_t bytes) {
  update_elements<Number>(destination, source, bytes,
                          [reduction](Number old, Number operand) { return combine(reduction, old, operand); });
}

void reduce_halves(Reduction reduction, Format half, void* destination, const void* source, uint32_t bytes) {
  HalfOptions options;
  options.half = half;
  update_elements<uint16_t>(destination, source, bytes, [&](uint16_t old, uint16_t operand) {
    const uint32_t result = reduction == Reduction::add   ? add_half(old, operand, options)
                            : reduction == Reduction::min ? min_half(old, operand, half)
                                                          : max_half(old, operand, half);
    return static_cast<uint16_t>(result);
  });
}

const char* reduction_name(Reduction reduction) {
  static constexpr const char* names[] = {"add", "min", "max", "inc", "dec", "and", "or", "xor"};
  return names[static_cast<size_t>(reduction)];
}

bool is_tf32(Element element) { return element == Element::tf32 || element == Element::tf32_ftz; }

}  // namespace

uint32_t box_count(const TensorMap& map, int dimension) {
  if (dimension == 0) return map.box[0];
  return (map.box[dimension] + map.element_stride[dimension] - 1) / map.element_stride[dimension];
}

uint32_t box_bytes(const TensorMap& map) {
  uint32_t bytes = static_cast<uint32_t>(map.stride[0]);
  for (int d = 0; d < map.rank; d++) bytes *= box_count(map, d);
  return bytes;
}

std::string check_tile_copy(const TensorMap& map, int instruction_rank, uint32_t shared_address) {
  if (map.rank != instruction_rank)
    return "The instruction is " + std::to_string(instruction_rank) + "D and its tensor map has rank " +
           std::to_string(map.rank) + ".";
  if (shared_address % 128 != 0)
    return "The shared address " + std::to_string(shared_address) + " of a tensor copy is not a multiple of 128 bytes.";
  return check_tensor_map(map);
}

void fill_out_of_bounds(const TensorMap& map, void* shared, uint32_t bytes) {
  std::memset(shared, 0, bytes);
  if (map.fill != OutOfBoundsFill::nan) return;
  switch (element_bytes(map.element)) {
    case 2:
      update_elements<uint16_t>(shared, shared, bytes, [](uint16_t, uint16_t) { return uint16_t{0x7fff}; });
      break;
    case 4:
      update_elements<uint32_t>(shared, shared, bytes, [](uint32_t, uint32_t) { return uint32_t{0x7fffffff}; });
      break;
    default:
      update_elements<uint64_t>(shared, shared, bytes, [](uint64_t, uint64_t) { return uint64_t{0x7fffffffffffffff}; });
  }
}

void convert_loaded(const TensorMap& map, void* shared, uint32_t bytes) {
  const bool flush = map.element == Element::f32_ftz || map.element == Element::tf32_ftz;
  if (!flush && !is_tf32(map.element)) return;
  ConvertOptions options;
  options.flush = flush;
  const Format format = is_tf32(map.element) ? Format::tf32 : Format::f32;
  update_elements<uint32_t>(shared, shared, bytes,
                            [&](uint32_t, uint32_t value) { return from_f32(format, float_of(value), options); });
}

std::string check_reduction(Reduction reduction, Element element) {
  const bool integer32 = element == Element::u32 || element == Element::s32;
  const bool integer64 = element == Element::u64 || element == Element::s64;
  const bool half = element == Element::f16 || element == Element::bf16;
  bool accepted = false;
  switch (reduction) {
    case Reduction::add:
      accepted = integer32 || integer64 || half || element == Element::f32 || element == Element::f32_ftz ||
                 element == Element::f64;
      break;
    case Reduction::min:
    case Reduction::max:
      accepted = integer32 || integer64 || half;
      break;
    case Reduction::inc:
    case Reduction::dec:
      accepted = element == Element::u32;
      break;
    default:
      accepted = integer32 || integer64;
  }
  if (accepted) return {};
  return std::string("A bulk reduction .") + reduction_name(reduction) + " of " + element_name(element) +
         " does not exist.";
}

void reduce_elements(Reduction reduction, Element element, void* destination, const void* source, uint32_t bytes) {
  switch (element) {
    case Element::u32:
      return reduce_integers<uint32_t>(reduction, destination, source, bytes);
    case Element::s32:
      return reduce_integers<int32_t>(reduction, destination, source, bytes);
    case Element::u64:
      return reduce_integers<uint64_t>(reduction, destination, source, bytes);
    case Element::s64:
      return reduce_integers<int64_t>(reduction, destination, source, bytes);
    case Element::f16:
      return reduce_halves(reduction, Format::f16, destination, source, bytes);
    case Element::bf16:
      return reduce_halves(reduction, Format::bf16, destination, source, bytes);
    case Element::f64:
      return update_elements<double>(destination, source, bytes,
                                     [](double old, double operand) { return old + operand; });
    default:
      return update_elements<float>(destination, source, bytes, [](float old, float operand) { return old + operand; });
  }
}

}  // namespace jax_fa4::emulator

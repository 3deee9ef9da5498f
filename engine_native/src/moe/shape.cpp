#include "moe/shape.hpp"

#include <string>

namespace kvxfer::moe {
namespace {

constexpr std::uint32_t kMaxRanks = 1024;
constexpr std::uint32_t kMaxExperts = 1U << 16;
constexpr std::uint32_t kMaxHidden = 1U << 20;
constexpr std::uint32_t kMaxSlots = 16;
// The maximum of all slots: it keeps writes to one peer below the engine's bound on queued writes.
constexpr std::uint64_t kMaxTokensUnderWay = std::uint64_t{1} << 20;

Result<void> within(const char* what, std::uint64_t value, std::uint64_t least,
                    std::uint64_t most) {
  if (value >= least && value <= most) return {};
  return invalid_argument(std::string(what) + " is " + std::to_string(value) + "; allowed are " +
                          std::to_string(least) + " to " + std::to_string(most));
}

Result<void> check_dtypes(const Shape& shape) {
  if (shape.input == DType::f8_e4m3 && shape.wire != DType::f8_e4m3) {
    return invalid_argument(std::string("an input of f8_e4m3 travels as it is, not as ") +
                            name_of(shape.wire));
  }
  if (shape.combine == DType::f8_e4m3 || shape.output == DType::f8_e4m3) {
    return invalid_argument("combine and output cannot be f8_e4m3; use bf16, f16 or f32");
  }
  if (shape.scale_block > 0 && shape.wire != DType::f8_e4m3) {
    return invalid_argument(std::string("scale_block needs a wire of f8_e4m3, not ") +
                            name_of(shape.wire));
  }
  return {};
}

}  // namespace

Result<void> check(const Shape& shape) {
  const std::uint64_t most_tokens =
      shape.slots == 0 ? kMaxTokensUnderWay : kMaxTokensUnderWay / shape.slots;
  for (const Result<void>& good :
       {within("ranks", shape.ranks, 1, kMaxRanks),
        within("rank", shape.rank, 0, shape.ranks == 0 ? 0 : shape.ranks - 1),
        within("experts", shape.experts, 1, kMaxExperts),
        within("top_k", shape.top_k, 1, shape.experts),
        within("hidden", shape.hidden, 1, kMaxHidden), within("slots", shape.slots, 1, kMaxSlots),
        within("max_tokens", shape.max_tokens, 1, most_tokens),
        within("scale_block", shape.scale_block, 0, shape.hidden), check_dtypes(shape)}) {
    if (!good) return good;
  }
  if (shape.local_experts.size() != shape.ranks) {
    return invalid_argument("local_experts has " + std::to_string(shape.local_experts.size()) +
                            " members; pass one for each of the " + std::to_string(shape.ranks) +
                            " ranks");
  }
  for (const std::uint32_t experts : shape.local_experts) {
    if (auto good = within("a member of local_experts", experts, 0, kMaxExperts); !good) {
      return good;
    }
  }
  return {};
}

std::uint64_t digest(const Shape& shape) {
  std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a, a word at a time
  const auto add = [&hash](std::uint64_t word) { hash = (hash ^ word) * 0x100000001b3; };
  for (const std::uint32_t word : {shape.ranks, shape.experts, shape.top_k, shape.hidden,
                                   shape.max_tokens, shape.slots, shape.scale_block}) {
    add(word);
  }
  for (const DType dtype : {shape.input, shape.wire, shape.combine, shape.output}) {
    add(static_cast<std::uint64_t>(dtype));
  }
  for (const std::uint32_t experts : shape.local_experts) add(experts);
  return hash;
}

}  // namespace kvxfer::moe

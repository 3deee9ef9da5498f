// The bytes of one run of a fuzzer, taken from the front: zeros once they are used up.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <type_traits>

namespace kvxfer::fuzz {

class Input {
 public:
  explicit Input(std::string_view bytes) : rest_(bytes) {}

  bool empty() const { return rest_.empty(); }
  template <class T>
    requires std::is_trivially_copyable_v<T>
  T get() {
    T value{};
    const std::string_view bytes = take(sizeof value);
    if (!bytes.empty()) std::memcpy(&value, bytes.data(), bytes.size());
    return value;
  }
  std::uint8_t byte() { return get<std::uint8_t>(); }
  bool flag() { return (byte() & 1) != 0; }
  std::size_t below(std::size_t end) { return byte() % end; }
  // Returns a mostly small number, at times any.
  std::uint64_t number() {
    const std::uint8_t small = byte();
    return small == 0xff ? get<std::uint64_t>() : small;
  }
  std::string_view take(std::size_t size) {
    const std::string_view taken = rest_.substr(0, size);
    rest_.remove_prefix(taken.size());
    return taken;
  }
  // Returns a text whose length comes first.
  std::string_view text() { return take(byte()); }
  std::string_view rest() { return take(rest_.size()); }

 private:
  std::string_view rest_;
};

// Aborts if a promise of the code under test is broken.
inline void require(bool kept, const char* promise) {
  if (kept) return;
  std::fprintf(stderr, "broken: %s\n", promise);
  std::abort();
}

}  // namespace kvxfer::fuzz

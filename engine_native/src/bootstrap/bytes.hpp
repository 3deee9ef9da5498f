// Little-endian encoding of the small bodies that engines exchange while they connect.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

namespace kvxfer {

class ByteWriter {
 public:
  template <class T>
    requires std::is_trivially_copyable_v<T>
  ByteWriter& put(const T& value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  ByteWriter& text(std::string_view value) {
    put(static_cast<std::uint16_t>(value.size()));
    bytes_.append(value);
    return *this;
  }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Reads what ByteWriter wrote; after a short read everything reads as zero and good() is false.
class ByteReader {
 public:
  explicit ByteReader(std::string_view bytes) : rest_(bytes) {}

  template <class T>
    requires std::is_trivially_copyable_v<T>
  T get() {
    T value{};
    if (rest_.size() < sizeof value) {
      good_ = false;
      return value;
    }
    std::memcpy(&value, rest_.begin(), sizeof value);
    rest_.remove_prefix(sizeof value);
    return value;
  }
  std::string text() {
    const auto size = get<std::uint16_t>();
    if (rest_.size() < size) good_ = false;
    if (!good_) return {};
    std::string value(rest_.substr(0, size));
    rest_.remove_prefix(size);
    return value;
  }
  bool good() const { return good_; }
  bool finished() const { return good_ && rest_.empty(); }

 private:
  std::string_view rest_;
  bool good_ = true;
};

}  // namespace kvxfer

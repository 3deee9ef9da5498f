// Page indices from any Python buffer of 32- or 64-bit signed integers, without a copy for 64.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

namespace kvxfer {

class PageList {
 public:
  // `name` is the argument's, for the error text.
  PageList(const pybind11::object& object, const char* name) {
    namespace py = pybind11;
    if (!PyObject_CheckBuffer(object.ptr())) {
      throw py::type_error(std::string(name) +
                           " must be a buffer of int32 or int64, e.g. a numpy array");
    }
    buffer_ = py::buffer(object).request();
    const bool integers =
        buffer_.format.size() == 1 && std::string("ilqn").find(buffer_.format) != std::string::npos;
    if (!integers || (buffer_.itemsize != 4 && buffer_.itemsize != 8) || buffer_.ndim != 1) {
      throw py::type_error(
          std::string(name) + " must be one-dimensional and of int32 or int64, not of format '" +
          buffer_.format + "' with " + std::to_string(buffer_.ndim) + " dimensions");
    }
    const auto size = static_cast<std::size_t>(buffer_.size);
    const bool contiguous = size < 2 || buffer_.strides[0] == buffer_.itemsize;
    if (contiguous && buffer_.itemsize == 8) {
      pages_ = {static_cast<const std::int64_t*>(buffer_.ptr), size};
      return;
    }
    const auto* at = static_cast<const char*>(buffer_.ptr);
    copy_.reserve(size);
    for (std::size_t i = 0; i < size; ++i, at += buffer_.strides[0]) {
      copy_.push_back(buffer_.itemsize == 8 ? load<std::int64_t>(at) : load<std::int32_t>(at));
    }
    pages_ = copy_;
  }

  std::span<const std::int64_t> pages() const { return pages_; }

 private:
  template <class T>
  static T load(const char* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
  }

  pybind11::buffer_info buffer_;  // keeps the caller's buffer alive
  std::vector<std::int64_t> copy_;
  std::span<const std::int64_t> pages_;
};

}  // namespace kvxfer

// Page numbers, offsets and lengths from Python; contiguous buffers of int64 are not copied.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bindings.hpp"

namespace kvxfer::python {

class PageList {
 public:
  // Takes any sequence of integers, or one-dimensional buffer of any integer type. An object that
  // is no buffer and has `__array__`, such as a tensor, is asked for one. `name` is for error
  // texts.
  PageList(const pybind11::object& object, std::string_view name) : name_(name) {
    namespace py = pybind11;
    py::object values = object;
    if (!PyObject_CheckBuffer(values.ptr()) && py::hasattr(values, "__array__")) {
      values = values.attr("__array__")();
    }
    PyObject_CheckBuffer(values.ptr()) ? read_buffer(values) : read_sequence(values);
  }
  PageList(const PageList&) = delete;
  PageList& operator=(const PageList&) = delete;

  std::span<const std::int64_t> pages() const { return pages_; }

 private:
  void read_sequence(const pybind11::object& values) {
    namespace py = pybind11;
    if (!PySequence_Check(values.ptr()) || PyUnicode_Check(values.ptr())) refuse(py::repr(values));
    const auto items = py::reinterpret_steal<py::object>(PySequence_Fast(values.ptr(), ""));
    if (!items) throw py::error_already_set();
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(items.ptr());
    copy_.reserve(static_cast<std::size_t>(size));
    for (Py_ssize_t i = 0; i < size; ++i) {
      const py::handle item = PySequence_Fast_GET_ITEM(items.ptr(), i);
      const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(item.ptr()));
      if (!number) {
        PyErr_Clear();
        refuse("not of integers alone: item " + std::to_string(i) + " is " +
               std::string(py::repr(item)));
      }
      int overflow = 0;
      const std::int64_t value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
      if (overflow != 0) leave(static_cast<std::size_t>(i), std::string(py::repr(number)));
      copy_.push_back(value);
    }
    pages_ = copy_;
  }

  void read_buffer(const pybind11::buffer& values) {
    buffer_ = values.request();
    const std::string_view format = buffer_.format;
    // Native byte order only.
    const std::string_view type = format.substr(
        format.starts_with('@') || format.starts_with('=') || format.starts_with('<') ? 1 : 0);
    const bool is_signed =
        type.size() == 1 && std::string_view("bhilqn").find(type[0]) != std::string_view::npos;
    const bool is_unsigned =
        type.size() == 1 && std::string_view("BHILQN").find(type[0]) != std::string_view::npos;
    if (!is_signed && !is_unsigned) refuse("a buffer of format '" + buffer_.format + "'");
    if (buffer_.ndim != 1) refuse("of " + std::to_string(buffer_.ndim) + " dimensions");
    const auto size = static_cast<std::size_t>(buffer_.size);
    const bool contiguous = size < 2 || buffer_.strides[0] == buffer_.itemsize;
    if (contiguous && is_signed && buffer_.itemsize == sizeof(std::int64_t)) {
      pages_ = {static_cast<const std::int64_t*>(buffer_.ptr), size};
      return;
    }
    copy_.reserve(size);
    switch (buffer_.itemsize) {
      case 1:
        is_signed ? copy<std::int8_t>() : copy<std::uint8_t>();
        break;
      case 2:
        is_signed ? copy<std::int16_t>() : copy<std::uint16_t>();
        break;
      case 4:
        is_signed ? copy<std::int32_t>() : copy<std::uint32_t>();
        break;
      default:
        is_signed ? copy<std::int64_t>() : copy<std::uint64_t>();
    }
    pages_ = copy_;
  }

  template <class T>
  void copy() {
    const auto* at = static_cast<const char*>(buffer_.ptr);
    for (std::size_t i = 0; i < static_cast<std::size_t>(buffer_.size); ++i) {
      T value;
      std::memcpy(&value, at, sizeof value);
      at += buffer_.strides[0];
      if (!std::in_range<std::int64_t>(value)) leave(i, std::to_string(value));
      copy_.push_back(static_cast<std::int64_t>(value));
    }
  }

  [[noreturn]] void refuse(const std::string& is) const {
    throw NativeError({Errc::invalid_argument,
                       name_ + " is " + is +
                           "; pass a sequence of integers, or a one-dimensional array of them"});
  }

  [[noreturn]] void leave(std::size_t position, const std::string& value) const {
    throw NativeError({Errc::out_of_bounds, name_ + " has " + value + " at position " +
                                                std::to_string(position) +
                                                ", which is beyond any region"});
  }

  std::string name_;
  pybind11::buffer_info buffer_;  // keeps the caller's buffer alive
  std::vector<std::int64_t> copy_;
  std::span<const std::int64_t> pages_;
};

}  // namespace kvxfer::python

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cerrno>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "pages.hpp"
#include "shared_mailbox.hpp"
#include "tcp.hpp"

namespace py = pybind11;

namespace kvxfer::probes {
namespace {

using PageArray = py::array_t<std::int64_t, py::array::c_style>;

std::span<const std::int64_t> as_span(const PageArray& pages) {
  return {pages.data(), static_cast<std::size_t>(pages.size())};
}

std::span<const std::byte> readable(const py::buffer_info& buffer) {
  return {static_cast<const std::byte*>(buffer.ptr),
          static_cast<std::size_t>(buffer.size * buffer.itemsize)};
}

std::span<std::byte> writable(const py::buffer_info& buffer) {
  if (buffer.readonly) throw std::invalid_argument("the destination is read-only");
  return {static_cast<std::byte*>(buffer.ptr),
          static_cast<std::size_t>(buffer.size * buffer.itemsize)};
}

template <typename Bytes>
Bytes not_empty(Bytes bytes) {
  if (bytes.empty()) throw std::invalid_argument("the buffer is empty");
  return bytes;
}

SharedMailbox& as_mailbox(const py::buffer_info& buffer) {
  const std::span<std::byte> bytes = writable(buffer);
  if (bytes.size() < sizeof(SharedMailbox)) {
    throw std::invalid_argument("the mailbox needs " + std::to_string(sizeof(SharedMailbox)) +
                                " bytes");
  }
  if (reinterpret_cast<std::uintptr_t>(bytes.data()) % alignof(SharedMailbox) != 0) {
    throw std::invalid_argument("the mailbox must start at a page");
  }
  return *reinterpret_cast<SharedMailbox*>(bytes.data());
}

Wait as_wait(bool spin) { return spin ? Wait::kSpin : Wait::kSleep; }

/// Runs `probe` without the GIL.
template <typename Probe>
auto without_gil(Probe&& probe) {
  const py::gil_scoped_release release;
  return std::forward<Probe>(probe)();
}

void translate_system_error(std::exception_ptr pending) {
  try {
    if (pending) std::rethrow_exception(pending);
  } catch (const std::system_error& error) {
    const py::object os_error =
        py::handle(PyExc_OSError)(error.code().value(), std::string(error.what()));
    PyErr_SetObject(PyExc_OSError, os_error.ptr());
  }
}

}  // namespace
}  // namespace kvxfer::probes

PYBIND11_MODULE(_probes, module) {
  using namespace kvxfer::probes;

  module.doc() = "The limits that `kvxfer bench` measures beside the engine.";
  module.attr("MAILBOX_BYTES") = sizeof(SharedMailbox);
  module.attr("MAIL_PAGE_OFFSET") = offsetof(SharedMailbox, page);
  module.attr("MAIL_PAGE_BYTES") = kMailPageBytes;
  module.attr("READV_BATCH") = kReadvBatch;
  py::register_exception_translator(&translate_system_error);

  module.def(
      "copy_pages",
      [](const py::buffer& src, const PageArray& src_pages, const py::buffer& dst,
         const PageArray& dst_pages, std::size_t page_bytes) {
        const py::buffer_info src_info = src.request();
        const py::buffer_info dst_info = dst.request();
        const std::span<const std::byte> from = readable(src_info);
        const std::span<std::byte> to = writable(dst_info);
        const PageLists pages{as_span(src_pages), as_span(dst_pages), page_bytes};
        check_pages(pages, from.size(), to.size());
        return without_gil([&] { return copy_pages(from, to, pages); });
      },
      py::arg("src"), py::arg("src_pages"), py::arg("dst"), py::arg("dst_pages"),
      py::arg("page_bytes"));

  module.def(
      "read_pages",
      [](pid_t pid, std::uintptr_t src_address, std::size_t src_bytes, const PageArray& src_pages,
         const py::buffer& dst, const PageArray& dst_pages, std::size_t page_bytes) {
        const py::buffer_info dst_info = dst.request();
        const std::span<std::byte> to = writable(dst_info);
        const PageLists pages{as_span(src_pages), as_span(dst_pages), page_bytes};
        check_pages(pages, src_bytes, to.size());
        return without_gil([&] { return read_pages(pid, src_address, to, pages); });
      },
      py::arg("pid"), py::arg("src_address"), py::arg("src_bytes"), py::arg("src_pages"),
      py::arg("dst"), py::arg("dst_pages"), py::arg("page_bytes"));

  module.def("allow_reader", &allow_reader, py::arg("pid"));

  module.def(
      "tcp_send",
      [](int fd, std::size_t nbytes, std::size_t times, const py::buffer& buffer) {
        const py::buffer_info info = buffer.request();
        const std::span<const std::byte> bytes = not_empty(readable(info));
        return without_gil([&] { return tcp_send(fd, nbytes, times, bytes); });
      },
      py::arg("fd"), py::arg("nbytes"), py::arg("times"), py::arg("buffer"));

  module.def(
      "tcp_receive",
      [](int fd, std::size_t nbytes, std::size_t times, const py::buffer& buffer) {
        const py::buffer_info info = buffer.request();
        const std::span<std::byte> bytes = not_empty(writable(info));
        without_gil([&] { tcp_receive(fd, nbytes, times, bytes); });
      },
      py::arg("fd"), py::arg("nbytes"), py::arg("times"), py::arg("buffer"));

  module.def(
      "tcp_ping",
      [](int fd, std::size_t message_bytes, std::size_t count, std::int64_t gap_ns, bool spin) {
        return without_gil(
            [&] { return tcp_ping(fd, message_bytes, count, gap_ns, as_wait(spin)); });
      },
      py::arg("fd"), py::arg("message_bytes"), py::arg("count"), py::arg("gap_ns"),
      py::arg("spin"));

  module.def(
      "tcp_pong",
      [](int fd, std::size_t message_bytes, std::size_t count, bool spin) {
        return without_gil([&] { return tcp_pong(fd, message_bytes, count, as_wait(spin)); });
      },
      py::arg("fd"), py::arg("message_bytes"), py::arg("count"), py::arg("spin"));

  module.def(
      "mailbox_post",
      [](const py::buffer& mailbox, std::size_t count, std::int64_t gap_ns, bool spin) {
        const py::buffer_info info = mailbox.request();
        SharedMailbox& shared = as_mailbox(info);
        return without_gil([&] { return mailbox_post(shared, count, gap_ns, as_wait(spin)); });
      },
      py::arg("mailbox"), py::arg("count"), py::arg("gap_ns"), py::arg("spin"));

  module.def(
      "mailbox_take",
      [](const py::buffer& mailbox, std::size_t count, bool spin,
         std::optional<std::pair<pid_t, std::uintptr_t>> remote) {
        const py::buffer_info info = mailbox.request();
        SharedMailbox& shared = as_mailbox(info);
        std::optional<RemotePage> page;
        if (remote) page = RemotePage{remote->first, remote->second};
        return without_gil([&] { return mailbox_take(shared, count, as_wait(spin), page); });
      },
      py::arg("mailbox"), py::arg("count"), py::arg("spin"), py::arg("remote") = py::none());
}

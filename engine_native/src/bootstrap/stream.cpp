#include "bootstrap/stream.hpp"

#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "error_text.hpp"
#include "net/socket.hpp"

namespace kvxfer {

Result<std::unique_ptr<Stream>> Stream::open(UniqueFd socket, Poller& poller, StreamOwner& owner) {
  std::unique_ptr<Stream> stream(new Stream(std::move(socket), poller, owner));
  if (auto good = poller.add(stream->fd(), EPOLLIN | EPOLLOUT, *stream); !good) {
    stream->lost_ = true;
    return good.error();
  }
  return stream;
}

Stream::~Stream() {
  if (socket_ && !lost_) poller_.remove(fd(), *this);
}

void Stream::write(std::string bytes) {
  thread_.check("Stream");
  if (lost_ || bytes.empty()) return;
  unsent_ += bytes.size();
  out_.push_back(std::move(bytes));
  // A failure shows again as an event, through which the owner is told.
  if (connected_) (void)flush();
}

bool Stream::has_input() const {
  char next = 0;
  return !lost_ && ::recv(fd(), &next, sizeof next, MSG_PEEK | MSG_DONTWAIT) > 0;
}

UniqueFd Stream::release() {
  poller_.remove(fd(), *this);
  lost_ = true;
  return std::move(socket_);
}

void Stream::on_events(std::uint32_t events) {
  thread_.check("Stream");
  if (lost_) return;
  if (!connected_) {
    if (const int error = net::connect_error(fd()); error != 0) {
      return lose({Errc::connect_failed, errno_text(error)});
    }
    if (!(events & (EPOLLOUT | EPOLLIN))) return;
    connected_ = true;
  }
  const auto sent = flush();
  if (!sent || (events & (EPOLLIN | EPOLLHUP | EPOLLERR))) {
    const std::size_t heard = in_.size();
    const auto received = receive();
    const bool more = in_.size() > heard;
    // An owner may pass the stream on in the middle of the input.
    for (StreamOwner* reader = nullptr; !lost_ && !in_.empty() && reader != owner_;) {
      reader = owner_;
      reader->on_input(in_);
    }
    if (lost_) return;
    if (!received) return lose(received.error());
    // A peer that cannot be sent to any more may have sent something before.
    if (!sent && !more) lose(sent.error());
  }
}

Result<void> Stream::receive() {
  std::array<char, 65536> buffer;
  const ssize_t got = ::recv(fd(), buffer.data(), buffer.size(), MSG_DONTWAIT);
  if (got > 0) {
    in_.append(buffer.data(), static_cast<std::size_t>(got));
    return {};
  }
  if (got == 0) return Error{Errc::peer_lost, "the peer closed the connection"};
  if (errno == EAGAIN || errno == EINTR) return {};
  return Error{Errc::peer_lost, std::string("receiving failed: ") + errno_text()};
}

Result<void> Stream::flush() {
  bool full = false;
  while (!out_.empty() && !full) {
    const std::string& front = out_.front();
    const ssize_t sent = ::send(fd(), front.data() + front_sent_, front.size() - front_sent_,
                                MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN) {
        return Error{Errc::peer_lost, std::string("sending failed: ") + errno_text()};
      }
      full = true;
      continue;
    }
    front_sent_ += static_cast<std::size_t>(sent);
    unsent_ -= static_cast<std::size_t>(sent);
    if (front_sent_ == front.size()) {
      out_.pop_front();
      front_sent_ = 0;
      owner_->on_sent();
    }
  }
  if (full != waiting_for_room_) {
    waiting_for_room_ = full;
    poller_.modify(fd(), full ? EPOLLIN | EPOLLOUT : EPOLLIN, *this);
  }
  return {};
}

void Stream::lose(Error error) {
  lost_ = true;
  poller_.remove(fd(), *this);
  owner_->on_stream_lost(std::move(error));
}

}  // namespace kvxfer

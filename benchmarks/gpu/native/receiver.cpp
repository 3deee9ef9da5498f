#include "receiver.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <sstream>
#include <vector>

#include "gpu_memory.hpp"
#include "tcp.hpp"

namespace kvxfer::gpu_bench {
namespace {

constexpr std::size_t kMostLine = 4096;

std::string hex(std::string_view bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const char byte : bytes) {
    text += kDigits[static_cast<unsigned char>(byte) >> 4];
    text += kDigits[static_cast<unsigned char>(byte) & 15];
  }
  return text;
}

std::string unhex(const std::string& text) {
  std::string bytes;
  for (std::size_t i = 0; i + 1 < text.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

int connected_to(int port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    give_up("cannot connect to the benchmark's own port");
  }
  return fd;
}

// The state of the child between two requests.
struct Side {
  std::unique_ptr<TransferEngine> engine;
  RegionPtr pool;

  void close() {
    if (engine) good(engine->deregister(pool));
    pool.reset();
    engine.reset();
  }
};

std::string answer(Side& side, const std::string& request) {
  std::istringstream words(request);
  std::string what;
  words >> what;
  if (what == "open") {
    std::string fabric;
    bool on_gpu = false;
    words >> fabric >> on_gpu;
    side.close();
    side.engine = good(TransferEngine::create(options_of(fabric, "receiver")));
    side.pool = pool(*side.engine, on_gpu);
    return side.engine->address().text() + " " + hex(descriptor_of(side.pool).encode()) + " " +
           std::to_string(good(side.engine->allocate_counter()));
  }
  if (what == "check") {
    std::size_t page = 0;
    std::size_t request_bytes = 0;
    words >> page >> request_bytes;
    const std::size_t wrong = wrong_words(get(side.pool), draw(page, request_bytes), page);
    put(side.pool, std::vector<std::uint64_t>(kPoolBytes / sizeof(std::uint64_t)));
    return std::to_string(wrong);
  }
  if (what == "tcp") {
    int port = 0;
    std::size_t times = 0;
    words >> port >> times;
    const int fd = connected_to(port);
    std::vector<std::byte> buffer(std::size_t{64} << 20);
    probes::tcp_receive(fd, kRequestBytes, times, buffer);
    ::close(fd);
    return "done";
  }
  side.close();
  return "";
}

[[noreturn]] void serve(int fd) {
  use_gpu();
  Side side;
  std::array<char, kMostLine> line{};
  while (true) {
    std::array<pollfd, 2> ready{{{fd, POLLIN, 0}, {-1, POLLIN, 0}}};
    if (side.engine) ready[1].fd = side.engine->event_fd();
    ::poll(ready.data(), ready.size(), -1);
    if (ready[1].revents != 0) {
      for (const Completion& done : side.engine->drain()) {
        if (done.code == Errc::ok || done.code == Errc::peer_lost) continue;
        std::fprintf(stderr, "bench-gpu: receiver: %s\n", done.text.c_str());
      }
    }
    if (ready[0].revents == 0) continue;
    const ssize_t size = ::recv(fd, line.data(), line.size(), 0);
    if (size <= 0) break;
    const std::string reply = answer(side, {line.data(), static_cast<std::size_t>(size)});
    if (reply.empty() || ::send(fd, reply.data(), reply.size(), 0) < 0) break;
  }
  side.close();
  ::_exit(0);
}

}  // namespace

EngineOptions options_of(const std::string& fabric, const std::string& name) {
  EngineOptions options;
  options.cluster_key = kClusterKey;
  options.name = name;
  options.local = fabric == "local";
  options.tcp = fabric == "tcp";
  options.peer_timeout = std::chrono::seconds(10);
  return options;
}

Receiver::Receiver() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) != 0) give_up("no socket pair");
  child_ = ::fork();
  if (child_ < 0) give_up("cannot fork");
  if (child_ == 0) {
    ::close(ends[0]);
    serve(ends[1]);
  }
  ::close(ends[1]);
  socket_ = ends[0];
}

Receiver::~Receiver() {
  ::close(socket_);
  ::waitpid(child_, nullptr, 0);
}

void Receiver::tell(const std::string& line) {
  if (::send(socket_, line.data(), line.size(), MSG_NOSIGNAL) < 0)
    give_up("the receiver has ended");
}

std::string Receiver::reply() {
  std::array<char, kMostLine> line{};
  const ssize_t size = ::recv(socket_, line.data(), line.size(), 0);
  if (size <= 0) give_up("the receiver has ended; its message is above");
  return {line.data(), static_cast<std::size_t>(size)};
}

std::string Receiver::ask(const std::string& line) {
  tell(line);
  return reply();
}

Receiver::Opened Receiver::open(const std::string& fabric, bool on_gpu) {
  std::istringstream reply(ask("open " + fabric + (on_gpu ? " 1" : " 0")));
  std::string address;
  std::string descriptor;
  Opened opened;
  reply >> address >> descriptor >> opened.imm;
  opened.address = good(EngineAddress::parse(address));
  opened.destination = good(MrDescriptor::decode(unhex(descriptor)));
  return opened;
}

std::size_t Receiver::check(std::size_t page_bytes, std::size_t request_bytes) {
  return std::stoull(
      ask("check " + std::to_string(page_bytes) + " " + std::to_string(request_bytes)));
}

void Receiver::begin_tcp(int port, std::size_t times) {
  tell("tcp " + std::to_string(port) + " " + std::to_string(times));
}

void Receiver::end_tcp() { reply(); }

}  // namespace kvxfer::gpu_bench

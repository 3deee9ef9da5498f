// Measures how long 4 KiB take from the call that writes them until the other process' counter
// shows them, beside what two processes reach by hand: by a copy and a flag in shared memory, and
// by a socket. Both sides poll and never sleep; one way is half of there and back.
//
//   latency [ROUNDS]
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <kvxfer/engine.hpp>
#include <new>
#include <string>
#include <vector>

namespace {

constexpr std::size_t kBytes = 4096;
constexpr int kWarmUp = 2000;

[[noreturn]] void fail(const std::string& why) {
  std::fprintf(stderr, "latency: %s\n", why.c_str());
  std::exit(1);
}

template <class T>
T good(kvxfer::Result<T> result) {
  if (!result) fail(result.error().text);
  return std::move(*result);
}

// Two ends of a socket, one for each process.
struct Ends {
  int of_parent;
  int of_child;
};

void tell(int socket, const std::string& text) {
  const auto size = static_cast<std::uint32_t>(text.size());
  if (::write(socket, &size, sizeof size) != sizeof size ||
      ::write(socket, text.data(), size) != static_cast<ssize_t>(size)) {
    fail("the other process is gone");
  }
}

std::string hear(int socket) {
  std::uint32_t size = 0;
  if (::recv(socket, &size, sizeof size, MSG_WAITALL) != sizeof size) fail("nothing was said");
  std::string text(size, '\0');
  if (::recv(socket, text.data(), size, MSG_WAITALL) != static_cast<ssize_t>(size)) {
    fail("the other process is gone");
  }
  return text;
}

void run_on(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  ::sched_setaffinity(0, sizeof set, &set);  // without permission the process stays where it is
}

// One side of a way: `send` the nth block, `receive` until the nth has come.
struct Way {
  std::function<void(std::uint64_t)> send;
  std::function<void(std::uint64_t)> receive;
};

// Returns the median one-way microseconds, in the parent; the child answers.
double ping_pong(const Way& way, bool parent, int rounds) {
  std::vector<double> took;
  for (int round = 1; round <= kWarmUp + rounds; ++round) {
    const auto n = static_cast<std::uint64_t>(round);
    if (!parent) way.receive(n);
    const auto began = std::chrono::steady_clock::now();
    way.send(n);
    if (!parent) continue;
    way.receive(n);
    const std::chrono::duration<double, std::micro> passed =
        std::chrono::steady_clock::now() - began;
    if (round > kWarmUp) took.push_back(passed.count() / 2);
  }
  if (!parent) return 0;
  std::nth_element(took.begin(), took.begin() + rounds / 2, took.end());
  return took[static_cast<std::size_t>(rounds) / 2];
}

// --- the engine ------------------------------------------------------------------------------

struct EngineWay {
  EngineWay(const std::string& fabric, int socket, bool parent) {
    kvxfer::EngineOptions options;
    options.cluster_key = "only for this measurement";
    options.local = fabric == "local";
    options.tcp = fabric == "tcp";
    options.tuning.lanes = 1;
    options.thread = false;
    engine = good(kvxfer::TransferEngine::create(options));
    source = good(engine->allocate(kBytes));
    destination = good(engine->allocate(kBytes));
    imm = good(engine->allocate_counter());
    if (parent) {
      tell(socket, engine->address().text());
    } else {
      engine->connect(good(kvxfer::EngineAddress::parse(hear(socket))), std::chrono::seconds(5));
    }
    while (!peer) {
      engine->poll();
      drain();
    }
    tell(socket, kvxfer::descriptor_of(destination).encode());
    tell(socket, std::to_string(imm));
    their_destination = good(kvxfer::MrDescriptor::decode(hear(socket)));
    their_imm = static_cast<kvxfer::Imm>(std::stoul(hear(socket)));
  }

  void drain() {
    for (const kvxfer::Completion& each : engine->drain()) {
      if (each.code != kvxfer::Errc::ok) fail(each.text);
      if (each.kind == kvxfer::Completion::Kind::peer_up) peer = each.peer;
    }
  }

  Way way() {
    return {[this](std::uint64_t) {
              good(engine->write(*peer, source, their_destination, {.length = kBytes},
                                 {.imm = their_imm}));
            },
            [this](std::uint64_t n) {
              while (engine->counter_value(imm) < n) engine->poll();
              drain();
            }};
  }

  std::unique_ptr<kvxfer::TransferEngine> engine;
  kvxfer::RegionPtr source;
  kvxfer::RegionPtr destination;
  kvxfer::Imm imm = 0;
  std::optional<kvxfer::PeerId> peer;
  kvxfer::MrDescriptor their_destination;
  kvxfer::Imm their_imm = 0;
};

double through_engine(const std::string& fabric, int socket, bool parent, int rounds) {
  EngineWay engine(fabric, socket, parent);
  const double us = ping_pong(engine.way(), parent, rounds);
  // Neither side closes while the other needs it.
  tell(socket, "done");
  while (true) {
    char byte = 0;
    engine.engine->poll();
    if (::recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT) > 0) break;
  }
  hear(socket);
  return us;
}

// --- by hand ---------------------------------------------------------------------------------

struct Mailbox {
  alignas(64) std::atomic<std::uint64_t> count = 0;
  alignas(64) std::byte bytes[kBytes];
};

struct Shared {
  Mailbox to_child;
  Mailbox to_parent;
};

double through_memory(Shared& shared, bool parent, int rounds) {
  std::vector<std::byte> source(kBytes);
  std::vector<std::byte> destination(kBytes);
  Mailbox& out = parent ? shared.to_child : shared.to_parent;
  Mailbox& in = parent ? shared.to_parent : shared.to_child;
  return ping_pong({[&](std::uint64_t n) {
                      std::memcpy(out.bytes, source.data(), kBytes);
                      out.count.store(n, std::memory_order_release);
                    },
                    [&](std::uint64_t n) {
                      while (in.count.load(std::memory_order_acquire) < n) {
                      }
                    }},
                   parent, rounds);
}

// A connection over loopback.
Ends connected() {
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = ::htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  if (::bind(listener, any, size) != 0 || ::listen(listener, 1) != 0 ||
      ::getsockname(listener, any, &size) != 0) {
    fail("cannot listen on loopback");
  }
  Ends ends{.of_parent = ::socket(AF_INET, SOCK_STREAM, 0), .of_child = -1};
  if (::connect(ends.of_parent, any, size) != 0) fail("cannot connect over loopback");
  ends.of_child = ::accept(listener, nullptr, nullptr);
  ::close(listener);
  const int on = 1;
  for (const int socket : {ends.of_parent, ends.of_child}) {
    ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }
  return ends;
}

double through_socket(int socket, bool parent, int rounds) {
  std::vector<std::byte> bytes(kBytes);
  return ping_pong({[&](std::uint64_t) {
                      if (::send(socket, bytes.data(), kBytes, 0) != kBytes)
                        fail("the socket broke");
                    },
                    [&](std::uint64_t) {
                      for (std::size_t have = 0; have < kBytes;) {
                        const ssize_t got =
                            ::recv(socket, bytes.data() + have, kBytes - have, MSG_DONTWAIT);
                        if (got > 0) have += static_cast<std::size_t>(got);
                        if (got == 0) fail("the socket broke");
                      }
                    }},
                   parent, rounds);
}

void report(bool parent, const char* fabric, double engine, double by_hand) {
  if (!parent) return;
  std::printf("%-6s  engine %7.2f us   by hand %7.2f us   ratio %5.2f\n", fabric, engine, by_hand,
              engine / by_hand);
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 20000;
  if (rounds < 1) fail("ROUNDS is " + std::string(argv[1]) + "; pass a number above 0");
  int pair[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) fail("cannot make a pair of sockets");
  const Ends talk{.of_parent = pair[0], .of_child = pair[1]};
  void* const memory =
      ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) fail("cannot share memory");
  Shared& shared = *::new (memory) Shared{};
  const Ends raw = connected();

  const pid_t child = ::fork();
  if (child < 0) fail("cannot fork");
  const bool parent = child > 0;
  ::close(parent ? talk.of_child : talk.of_parent);
  run_on(parent ? 0 : 1);
  const int socket = parent ? talk.of_parent : talk.of_child;
  const int stream = parent ? raw.of_parent : raw.of_child;

  const double local = through_engine("local", socket, parent, rounds);
  report(parent, "local", local, through_memory(shared, parent, rounds));
  const double tcp = through_engine("tcp", socket, parent, rounds);
  report(parent, "tcp", tcp, through_socket(stream, parent, rounds));
  if (!parent) return 0;
  int status = 0;
  ::waitpid(child, &status, 0);
  return status == 0 ? 0 : 1;
}

// The rendezvous of two engines of one host, over a unix socket; then they share rings and memory:
//
//   initiator → acceptor   lane hello (MAC of the session); ring, wake eventfd
//   acceptor → initiator   MAC, probe; ring, wake eventfd
//   initiator → acceptor   "I can read you", probe
//   acceptor → initiator   "I can read you"
//
// Each side lets the other read its memory only after the other has proved itself.
//
// A probe is an address and the random bytes stored there: reading it with process_vm_readv
// proves both the permission and that the process id means the same process on both sides.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "bootstrap/handshake.hpp"
#include "fabric/local/local_path.hpp"
#include "fd.hpp"
#include "poller.hpp"

namespace kvxfer::local {

// The state that all rendezvous of one engine share.
struct LocalHost {
  int wake_fd = -1;                      // our eventfd
  std::array<std::uint8_t, 16> probe{};  // random bytes that a peer may try to read
  pid_t readable_by = 0;                 // the process that Yama lets read us, see allow_reader()

  // Lets a process read our memory. With Yama's ptrace_scope 1 a process may name only one reader,
  // the first peer. Later peers use the tcp fabric for memory that is not shareable.
  void allow_reader(pid_t pid);
  void deny_reader(pid_t pid);
};

class Rendezvous final : private EventSink {
 public:
  // Called once; never from within start() or the constructor.
  using Done = std::function<void(Rendezvous&, Result<LocalLink>)>;
  // Finds the session of an arriving hello; null if there is none.
  using FindSession = std::function<const Session*(const SessionId&)>;

  // Initiator: connects to the peer's unix socket and sends the hello.
  static Result<std::unique_ptr<Rendezvous>> start(const Session& session, Poller& poller,
                                                   LocalHost& host, Done done);
  // Acceptor: waits for the hello on an accepted socket.
  static Result<std::unique_ptr<Rendezvous>> accept(UniqueFd socket, FindSession find,
                                                    Poller& poller, LocalHost& host, Done done);
  ~Rendezvous();

  const SessionId& session() const { return session_.id; }
  std::uint64_t started_ns() const { return started_ns_; }
  // True if the connection has not proved to belong to a session.
  bool stranger() const { return stranger_; }

 private:
  enum class Wait { hello, reply, probe, verdict };
  struct Probe {
    std::uint64_t address = 0;
    std::array<std::uint8_t, 16> bytes{};
  };

  Rendezvous(UniqueFd socket, Wait wait, Poller& poller, LocalHost& host, Done done);

  void on_events(std::uint32_t events) override;
  Result<bool> advance();  // true once complete
  Result<bool> on_hello();
  Result<bool> on_reply();
  Result<bool> on_probe();
  Result<bool> on_verdict();
  Result<void> take_descriptors(std::vector<UniqueFd>& descriptors);
  bool can_read(const Probe& probe) const;
  Probe own_probe() const;

  UniqueFd socket_;
  Wait wait_;
  Poller& poller_;
  LocalHost& host_;
  Done done_;
  FindSession find_;
  Session session_;
  std::uint64_t started_ns_;
  pid_t pid_ = 0;
  std::optional<SharedRing> out_;
  std::optional<SharedRing> in_;
  UniqueFd wake_peer_;
  bool peer_reads_us_ = false;
  bool we_read_peer_ = false;
  bool stranger_ = false;
  bool finished_ = false;
};

// Returns the name of an engine's unix socket in the abstract namespace.
std::string socket_name(const EngineId& engine);

}  // namespace kvxfer::local

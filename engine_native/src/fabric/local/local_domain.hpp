// Shared memory between engines of one host.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "bootstrap/listener.hpp"
#include "domain.hpp"
#include "fabric/local/rendezvous.hpp"
#include "thread_owner.hpp"

namespace kvxfer::local {

// The owner of sessions and peers, above the fabric.
class LocalEvents {
 public:
  virtual const Session* find_session(const SessionId& session) = 0;
  // Called when the rendezvous of a session has ended, for initiator and acceptor alike.
  virtual void on_local_link(const SessionId& session, Result<LocalLink> link) = 0;
  // Called for a connection that did not prove to belong to a session.
  virtual void on_stranger_refused(Errc why) = 0;

 protected:
  ~LocalEvents() = default;
};

// Outlives its paths.
class LocalDomain final : public Domain, private EventSink {
 public:
  static Result<std::unique_ptr<LocalDomain>> open(const EngineId& engine, Poller& poller,
                                                   ReceiveContext receive_context,
                                                   PathEvents& path_events, LocalEvents& events,
                                                   GpuContext gpus);
  ~LocalDomain() override;

  std::string_view fabric() const override { return "local"; }
  void poll() override;
  bool prepare_sleep() override;
  void finish_sleep() override;
  void forget_source(const MemoryRegion& region) override;

  // Begins a rendezvous; on_local_link() follows, unless this fails at once.
  Result<void> connect(const Session& session);
  Result<std::unique_ptr<Path>> open_path(LocalLink link, PathPeer peer);
  // Gives up on rendezvous that began before `deadline_ns`, and accepts again after a rest.
  void expire(std::uint64_t deadline_ns);
  bool idle() const { return rendezvous_.empty() && !listener_.resting(); }

 private:
  LocalDomain(UniqueFd listener, UniqueFd wake, Poller& poller, ReceiveContext receive_context,
              PathEvents& path_events, LocalEvents& events, GpuContext gpus);

  void on_events(std::uint32_t events) override;
  void forget(const LocalPath& path);
  void accept(UniqueFd socket);
  void finish(Rendezvous& rendezvous, Result<LocalLink> link);
  void report(const Rendezvous& rendezvous, Result<LocalLink> link);
  Rendezvous::Done on_done();

  [[no_unique_address]] ThreadOwner thread_;
  Listener listener_;
  UniqueFd wake_;
  Poller& poller_;
  ReceiveContext receive_context_;
  PathEvents& path_events_;
  LocalEvents& events_;
  GpuContext gpus_;
  LocalHost host_;
  std::vector<LocalPath*> paths_;  // owned by their peers
  std::vector<std::unique_ptr<Rendezvous>> rendezvous_;
  std::vector<std::unique_ptr<Rendezvous>> ended_;  // until the next poll()
};

}  // namespace kvxfer::local

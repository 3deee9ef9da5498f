// NICs of a simulated network between the engines of one process: they place bytes on a thread of
// their own, late, in any order or path by path in that of the writes, and complete in it; their
// links go down, and completions get lost, when a test says so. A path without order that is shut
// leaves no completions, as EFA's (simulated_efa.hpp).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "fabric/nic/nic_domain.hpp"

namespace kvxfer::test {

class SimulatedPath;
class SimulatedDomain;

// What the NICs of an engine are, beyond good ones.
struct SimulatedTraits {
  bool ordered = false;              // each path keeps the order of its writes
  bool windows = false;              // they open grants path by path (NicDomain::max_window)
  std::vector<std::string> broken;   // names of further ones that cannot be opened
  std::vector<std::string> foreign;  // and of those that only other fabrics can use
};

// The wire and all NICs on it. Any thread.
class SimulatedNetwork {
 public:
  explicit SimulatedNetwork(std::uint64_t seed);
  ~SimulatedNetwork();

  // An engine with these NICs, e.g. {"nic0", 100} in Gbit/s. Names are unique in the network.
  std::shared_ptr<NicFactory> nics(std::vector<std::pair<std::string, std::uint64_t>> nics,
                                   SimulatedTraits traits = {});

  void set_link(const std::string& nic, bool up);
  // From now on writes arrive and are counted, but their senders never hear of it.
  void lose_completions(const std::string& nic, bool lose);
  // From now on writes to this NIC arrive and their senders hear of it, but its host never does.
  void lose_arrivals(const std::string& nic, bool lose);
  // Meanwhile writes to this NIC arrive and their senders hear of it, but its host does not yet.
  void withhold_arrivals(const std::string& nic, bool withheld);
  // How many ends of paths were shut.
  std::size_t ends_closed();
  // The next `times` writes of this NIC are refused by the peer's, which breaks their paths.
  void refuse_writes(const std::string& nic, unsigned times);
  // The next `times` attempts to join a path of this NIC to its peer fail.
  void refuse_joins(const std::string& nic, unsigned times);
  // How many of them are left.
  unsigned refusals_left(const std::string& nic);
  // While held, nothing is delivered but by deliver_newest().
  void hold(bool held);
  // Delivers the write that was posted last.
  void deliver_newest();
  // Returns once so many writes wait to be delivered.
  void await_posted(std::size_t count);
  std::uint64_t delivered(const std::string& nic);

 private:
  friend class SimulatedPath;
  friend class SimulatedDomain;
  friend class SimulatedRegistration;

  struct Packet {
    std::uint64_t from = 0;  // ends of paths
    std::uint64_t to = 0;
    std::uint64_t sequence = 0;  // that is delivered with it; 0: none
    std::uint64_t rkey = 0;
    std::uint64_t address = 0;
    const std::byte* source = nullptr;
    std::uint32_t length = 0;
    std::optional<Imm> imm;
    bool ordered = false;
  };
  struct Completion {
    SimulatedPath* path;
    std::uint64_t sequence = 0;  // of a write that was delivered
    std::optional<Imm> imm;      // of one that arrived
    bool refused = false;
    std::optional<std::uint64_t> grant;  // whose window is open
  };
  struct Nic {
    SimulatedDomain* domain = nullptr;
    bool up = true;
    std::uint64_t downs = 0;  // how often its link went down, unseen flaps too
    bool loses_completions = false;
    bool loses_arrivals = false;
    bool withholds_arrivals = false;
    unsigned refuses = 0;         // attempts to join
    unsigned refuses_writes = 0;  // that this NIC sends
    std::uint64_t delivered = 0;
    std::vector<Completion> completions;
    std::vector<Completion> withheld;
  };
  struct Permission {
    std::uint64_t address;
    std::uint64_t length;
    std::uint64_t end;  // of the path that it is good for; 0: all
  };

  void run(const std::stop_token& stop);
  Packet take(std::size_t index);
  void deliver(const Packet& packet);
  void complete(SimulatedPath& path, Completion completion);
  // Removes an end, and returns the completions that its host has not seen.
  std::vector<Completion> close(std::uint64_t end, const SimulatedPath& path);

  std::mutex mutex_;
  std::condition_variable_any arrived_;
  std::mt19937_64 random_;
  std::map<std::string, Nic> nics_;
  std::map<std::uint64_t, SimulatedPath*> ends_;
  std::map<std::uint64_t, Permission> keys_;
  std::vector<Packet> wire_;
  std::set<std::uint64_t> broken_;  // ends of ordered paths: nothing comes behind a lost write
  std::uint64_t last_end_ = 0;
  std::size_t ends_closed_ = 0;
  bool held_ = false;
  std::jthread thread_;
};

// The one that engines of options_for("simulated") are on.
SimulatedNetwork& simulated_network();

}  // namespace kvxfer::test

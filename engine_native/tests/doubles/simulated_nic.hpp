// NICs of a simulated network between the engines of one process. A separate thread places bytes
// late, in any order or in the order of each path's writes, and completes writes in that order.
// When a test says so, links go down and completions get lost. A path without order that is shut
// leaves no completions, as with EFA (simulated_efa.hpp).
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

// How the NICs of an engine differ from good ones without order.
struct SimulatedTraits {
  bool ordered = false;              // each path keeps the order of its writes
  bool windows = false;              // they open grants path by path (NicDomain::max_window)
  std::vector<std::string> broken;   // names of more NICs that cannot be opened
  std::vector<std::string> foreign;  // names of more NICs that only other fabrics can use
};

// The wire and all NICs on it. Any thread.
class SimulatedNetwork {
 public:
  explicit SimulatedNetwork(std::uint64_t seed);
  ~SimulatedNetwork();

  // Creates an engine's NICs, e.g. {"nic0", 100} in Gbit/s. Names are unique in the network.
  std::shared_ptr<NicFactory> nics(std::vector<std::pair<std::string, std::uint64_t>> nics,
                                   SimulatedTraits traits = {});

  void set_link(const std::string& nic, bool up);
  // From now on writes arrive and are counted, but their senders get no completion.
  void lose_completions(const std::string& nic, bool lose);
  // From now on writes to this NIC arrive and their senders get completions, but its host does not.
  void lose_arrivals(const std::string& nic, bool lose);
  // While withheld, writes to this NIC arrive and their senders get completions, but its host does
  // not.
  void withhold_arrivals(const std::string& nic, bool withheld);
  // The number of path ends that were shut.
  std::size_t ends_closed();
  // The peer refuses the next `times` writes of this NIC, which breaks their paths.
  void refuse_writes(const std::string& nic, unsigned times);
  // The next `times` attempts to join a path of this NIC to its peer fail.
  void refuse_joins(const std::string& nic, unsigned times);
  // The number of these failures that are left.
  unsigned refusals_left(const std::string& nic);
  // While held, only deliver_newest() delivers.
  void hold(bool held);
  // Delivers the write that was posted last.
  void deliver_newest();
  // Returns once `count` writes wait to be delivered.
  void await_posted(std::size_t count);
  std::uint64_t delivered(const std::string& nic);

 private:
  friend class SimulatedPath;
  friend class SimulatedDomain;
  friend class SimulatedRegistration;

  struct Packet {
    std::uint64_t from = 0;  // `from` and `to` are ends of paths
    std::uint64_t to = 0;
    std::uint64_t sequence = 0;  // the write that it completes; 0 for none
    std::uint64_t rkey = 0;
    std::uint64_t address = 0;
    const std::byte* source = nullptr;
    std::uint32_t length = 0;
    std::optional<Imm> imm;
    bool ordered = false;
  };
  struct Completion {
    SimulatedPath* path;
    std::uint64_t sequence = 0;  // the write that was delivered
    std::optional<Imm> imm;      // the immediate of a write that arrived
    bool refused = false;
    std::optional<std::uint64_t> grant;  // the grant whose window is open
  };
  struct Nic {
    SimulatedDomain* domain = nullptr;
    bool up = true;
    std::uint64_t downs = 0;  // how often its link went down, including flaps that were not seen
    bool loses_completions = false;
    bool loses_arrivals = false;
    bool withholds_arrivals = false;
    unsigned refuses = 0;         // the number of attempts to join still to refuse
    unsigned refuses_writes = 0;  // the number of its writes still to refuse
    std::uint64_t delivered = 0;
    std::vector<Completion> completions;
    std::vector<Completion> withheld;
  };
  struct Permission {
    std::uint64_t address;
    std::uint64_t length;
    std::uint64_t end;  // the path end that it is valid for; 0 for all
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
  std::set<std::uint64_t> broken_;  // ends of ordered paths that deliver nothing after a lost write
  std::uint64_t last_end_ = 0;
  std::size_t ends_closed_ = 0;
  bool held_ = false;
  std::jthread thread_;
};

// The network of engines of options_for("simulated").
SimulatedNetwork& simulated_network();

}  // namespace kvxfer::test

// The parts of simulated_efa.hpp: libfabric's objects as a device keeps them, and the network that
// carries and places their writes.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "doubles/simulated_efa.hpp"
#include "fd.hpp"

namespace kvxfer::test::efa {

// An object that libfabric returns, which begins with its `fid`.
template <class Object>
struct Opened : Object {
  using Handle = Object;
};
template <class T>
T& from(fid* id) {
  return static_cast<T&>(*reinterpret_cast<typename T::Handle*>(id));
}

// An address as fi_getname() returns it.
struct Address {
  std::uint64_t gid = 0;
  std::uint32_t queue_pair = 0;
  std::uint32_t qkey = 0;
  std::array<std::uint64_t, 2> zero{};
};

struct Device {
  SimulatedEfaDevice traits;
  std::uint64_t gid;
};

struct Fabric : Opened<fid_fabric> {};
struct Events : Opened<fid_eq> {
  std::deque<fi_eq_err_entry> errors;
};

struct Domain : Opened<fid_domain> {
  Device* device = nullptr;
  bool gpus = false;  // opened with FI_HMEM
};

struct Memory : Opened<fid_mr> {
  Domain* domain = nullptr;
  std::uint64_t begin = 0;  // the address that writes name
  std::size_t size = 0;
  std::uint64_t access = 0;
  std::byte* bytes = nullptr;  // the same place in this process
  bool on_gpu = false;
  bool by_dmabuf = false;
  std::shared_ptr<void> mapping;  // for a dmabuf that was given

  bool holds(std::uint64_t address, std::uint64_t length) const {
    return address >= begin && length <= size && address - begin <= size - length;
  }
};

struct End;

struct Entry {
  fi_cq_data_entry done{};
  int error = 0;
  const End* of = nullptr;
};

struct Queue : Opened<fid_cq> {
  std::size_t size = 0;
  std::deque<Entry> entries;
  bool overrun = false;
  UniqueFd wakes{::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
  bool armed = false;

  void push(const Entry& entry) {
    overrun = overrun || entries.size() >= size;
    if (!overrun) entries.push_back(entry);
    const std::uint64_t one = 1;
    if (!std::exchange(armed, false)) return;
    [[maybe_unused]] const auto written = ::write(wakes.get(), &one, sizeof one);
  }
  // Drops the entries that the end left unread.
  void forget(const End& closed) {
    std::erase_if(entries, [&](const Entry& entry) { return entry.of == &closed; });
  }
  // Returns true if the queue is empty, so that a caller may wait.
  bool arm() {
    std::uint64_t count = 0;
    [[maybe_unused]] const auto got = ::read(wakes.get(), &count, sizeof count);
    armed = entries.empty() && !overrun;
    return armed;
  }
};

struct Addresses : Opened<fid_av> {
  std::vector<Address> known;
};

struct Write {
  std::uint32_t queue_pair;  // the sender's
  std::uint64_t from;        // the sending device
  Address to;
  std::uint64_t local_key;
  std::uint64_t source;
  std::uint32_t length;
  std::uint64_t address;
  std::uint64_t key;
  std::optional<std::uint64_t> imm;
  void* context;
  std::vector<std::byte> bytes = {};  // set once they were read
  bool tail_first = false;
  unsigned halves = 0;  // the number of landed halves
  bool told_receiver = false;
  bool told_sender = false;
};

struct End : Opened<fid_ep> {
  Domain* domain = nullptr;
  Queue* queue = nullptr;
  Addresses* peers = nullptr;
  Events* events = nullptr;
  bool enabled = false;
  bool needs_peer_to_peer = false;
  bool may_call_cuda = true;
  Address address;
  std::vector<Write> held;    // until a write without FI_MORE
  std::size_t under_way = 0;  // with the held writes
};

// fi_info with all that it points to.
struct Info : fi_info {
  fi_tx_attr tx;
  fi_rx_attr rx;
  fi_ep_attr ep;
  fi_domain_attr of_domain;
  fi_fabric_attr of_fabric;
  fid_nic card;
  fi_device_attr of_device;
  fi_link_attr link;
};

struct Network {
  std::mutex mutex;
  std::condition_variable_any work;
  std::mt19937_64 random{std::random_device{}()};
  bool has_cuda = true;
  bool holds = false;                                          // no write moves
  std::set<std::pair<std::uint64_t, std::uint64_t>> swallows;  // pairs of a sender and a receiver
  std::size_t swallowed = 0;
  bool withholds_arrivals = false;
  std::size_t ends_closed = 0;
  std::vector<std::unique_ptr<Device>> devices;
  std::map<std::uint32_t, End*> ends;         // enabled ends, by queue pair
  std::map<std::uint64_t, Memory*> memories;  // by key; lkey and rkey are equal
  std::vector<Write> writes;
  std::uint32_t last_pair = 0;
  std::uint64_t last_key = 0x1000;
  std::jthread wire{[this](const std::stop_token& stop) { run(stop); }};

  void run(const std::stop_token& stop);
  // Moves one write a step on.
  void step(std::size_t index);
  // Completes all landed writes at both ends.
  void end_landed();
  void remove(std::size_t index);
  // Completes the write at its sender, with an error or 0; reports its arrival to the receiver.
  static void tell(End& sender, const Write& write, int error);
  static void tell(const End& receiver, Write& write);
  // Returns true if traffic in this direction is lost, and counts it.
  bool swallow(std::uint64_t from, std::uint64_t to);
  const Memory* find(std::uint64_t key, const Domain* domain) const;
  // These return 0, or the error that ends the write. `sender` is null once it is closed.
  int move(Write& write, End* sender);
  int land(Write& write, const End* sender, const End& receiver);
};

}  // namespace kvxfer::test::efa

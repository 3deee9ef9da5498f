// The memory windows of one queue pair (type 2): each opens a range of a memory region to the other
// end, without anybody else's key. Engine thread only.
//
// Opening and closing are requests of the queue pair, in order with its writes. A window that was
// closed is used again, with its next key.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "fabric/nic/remote_region.hpp"
#include "fabric/verbs/verbs_device.hpp"

namespace kvxfer::verbs {

// What of a NIC a window opens.
struct WindowRange {
  ibv_mr* region;
  std::uint64_t address;
  std::uint64_t length;
};

class PathWindows {
 public:
  // Requests that may be in the queue pair for windows, besides its writes.
  static constexpr std::uint32_t kMaxRequests = 16;
  // In the wr_id of all of them.
  static constexpr std::uint64_t kRequest = std::uint64_t{1} << 62;

  PathWindows(std::shared_ptr<const VerbsDevice> device, ibv_qp* pair)
      : device_(std::move(device)), pair_(pair) {}
  ~PathWindows() { free_all(); }
  PathWindows(const PathWindows&) = delete;
  PathWindows& operator=(const PathWindows&) = delete;

  // Both are done by post(). False if the device has no window left.
  bool open(std::uint64_t grant, const WindowRange& range);
  void close(std::uint64_t grant);
  // Posts as many requests as the queue pair takes. Returns 0, or an errno.
  int post();
  // Returns the grant whose window is open now, if any; post() is to follow.
  std::optional<std::uint64_t> on_done(std::uint64_t request);
  // All of them; before the queue pair is destroyed, once it has stopped.
  void free_all();

  // Whether any is not free that opens, or opened, part of this.
  bool any_of(const ibv_mr* region) const;
  std::optional<RemoteKey> find(std::uint64_t grant) const;

 private:
  enum class State { free, opening, open, closing };
  struct Window {
    ibv_mw* window = nullptr;  // allocated when it is first used
    State state = State::free;
    bool wanted = false;
    std::uint64_t grant = 0;
    WindowRange range{};
  };

  int post_request(std::size_t index);
  void make_free(std::size_t index);

  std::shared_ptr<const VerbsDevice> device_;
  ibv_qp* pair_;
  std::vector<Window> windows_;
  std::vector<std::size_t> free_;
  std::unordered_map<std::uint64_t, std::size_t> by_grant_;
  std::deque<std::size_t> waiting_;  // to be opened or closed
  std::uint32_t requests_ = 0;
};

}  // namespace kvxfer::verbs

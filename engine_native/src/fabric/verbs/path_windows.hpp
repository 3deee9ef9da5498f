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
#include "thread_owner.hpp"

namespace kvxfer::verbs {

// What of a NIC a window opens.
struct WindowRange {
  ibv_mr* region;
  std::uint64_t address;
  std::uint64_t length;
};

// Any thread; outlived by its device. Making and freeing one takes the firmware.
class MemoryWindow {
 public:
  MemoryWindow() = default;
  explicit MemoryWindow(ibv_mw* window) : window_(window) {}
  // Fewer where the device has none left.
  static std::vector<MemoryWindow> make(const std::shared_ptr<const VerbsDevice>& device,
                                        std::size_t count);
  ibv_mw* get() const { return window_.get(); }
  ibv_mw* operator->() const { return window_.get(); }
  explicit operator bool() const { return window_ != nullptr; }

 private:
  struct Free {
    void operator()(ibv_mw* window) const { ibv_dealloc_mw(window); }
  };
  std::unique_ptr<ibv_mw, Free> window_;
};

class PathWindows {
 public:
  // Requests that may be in the queue pair for windows, besides its writes.
  static constexpr std::uint32_t kMaxRequests = 16;
  // In the wr_id of all of them.
  static constexpr std::uint64_t kRequest = std::uint64_t{1} << 62;

  explicit PathWindows(ibv_qp* pair) : pair_(pair) {}
  PathWindows(const PathWindows&) = delete;
  PathWindows& operator=(const PathWindows&) = delete;

  // Both are done by post(), once there are unmade() more.
  void open(std::uint64_t grant, const WindowRange& range);
  void close(std::uint64_t grant);
  std::size_t unmade() const { return unmade_.size(); }
  // For the first of those, in order; returns the grants that got none.
  std::vector<std::uint64_t> add(std::vector<MemoryWindow> made, std::size_t asked);
  // Posts as many requests as the queue pair takes. Returns 0, or an errno.
  int post();
  // Returns the grant whose window is open now, if any; post() is to follow.
  std::optional<std::uint64_t> on_done(std::uint64_t request);
  // To be freed before the queue pair is destroyed, once it has stopped.
  std::vector<MemoryWindow> take_all();

  // Whether any is not free that opens, or opened, part of this.
  bool any_of(const ibv_mr* region) const;
  std::optional<RemoteKey> find(std::uint64_t grant) const;

 private:
  enum class State { free, opening, open, closing };
  struct Window {
    MemoryWindow window;  // made when it is first used
    State state = State::free;
    bool wanted = false;
    std::uint64_t grant = 0;
    WindowRange range{};
  };

  int post_request(std::size_t index);
  void make_free(std::size_t index);

  [[no_unique_address]] ThreadOwner thread_;
  ibv_qp* pair_;
  std::vector<Window> windows_;
  std::vector<std::size_t> free_;
  std::unordered_map<std::uint64_t, std::size_t> by_grant_;
  std::deque<std::size_t> unmade_;
  std::deque<std::size_t> waiting_;  // to be opened or closed
  std::uint32_t requests_ = 0;
};

}  // namespace kvxfer::verbs

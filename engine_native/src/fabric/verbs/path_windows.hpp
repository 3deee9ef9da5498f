// The memory windows (type 2) of one queue pair. Each opens a range of a memory region to the other
// end, with a key that no other queue pair can use. Engine thread only.
//
// Opening and closing are requests of the queue pair, in order with its writes. A closed window is
// reused, with its next key.
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

// A range of a NIC's memory region that a window opens.
struct WindowRange {
  ibv_mr* region;
  std::uint64_t address;
  std::uint64_t length;
};

// A memory window; its device outlives it. The firmware makes and frees windows. Any thread.
class MemoryWindow {
 public:
  MemoryWindow() = default;
  explicit MemoryWindow(ibv_mw* window) : window_(window) {}
  // Makes `count` windows; fewer if the device has none left.
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
  // The most requests for windows in the queue pair, besides its writes.
  static constexpr std::uint32_t kMaxRequests = 16;
  // Marks the wr_id of each of these requests.
  static constexpr std::uint64_t kRequest = std::uint64_t{1} << 62;

  explicit PathWindows(ibv_qp* pair) : pair_(pair) {}
  PathWindows(const PathWindows&) = delete;
  PathWindows& operator=(const PathWindows&) = delete;

  // Queues the opening or the closing of a grant's window for post(). Opening may need another
  // window, which add() supplies.
  void open(std::uint64_t grant, const WindowRange& range);
  void close(std::uint64_t grant);
  std::size_t unmade() const { return unmade_.size(); }
  // Supplies windows for the first `asked` of the unmade(), in order. Returns the grants that got
  // none.
  std::vector<std::uint64_t> add(std::vector<MemoryWindow> made, std::size_t asked);
  // Posts as many requests as the queue pair takes. Returns 0, or an errno.
  int post();
  // Handles a completed request; post() is to follow. Returns the grant whose window is open now,
  // if any.
  std::optional<std::uint64_t> on_done(std::uint64_t request);
  // Returns all windows, to be freed after the queue pair has stopped and before it is destroyed.
  std::vector<MemoryWindow> take_all();

  // True if a window that is not free opens, or opened, part of this region.
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
  std::deque<std::size_t> waiting_;  // windows to be opened or closed
  std::uint32_t requests_ = 0;
};

}  // namespace kvxfer::verbs

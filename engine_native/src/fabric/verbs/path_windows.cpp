#include "fabric/verbs/path_windows.hpp"

#include <algorithm>
#include <cassert>
#include <utility>

namespace kvxfer::verbs {

std::vector<MemoryWindow> MemoryWindow::make(const std::shared_ptr<const VerbsDevice>& device,
                                             std::size_t count) {
  std::vector<MemoryWindow> made;
  while (made.size() < count) {
    ibv_mw* const window = ibv_alloc_mw(device->pd(), IBV_MW_TYPE_2);
    if (!window) break;
    made.emplace_back(window);
  }
  return made;
}

void PathWindows::open(std::uint64_t grant, const WindowRange& range) {
  thread_.check("PathWindows");
  if (by_grant_.contains(grant)) return;
  if (free_.empty()) {
    free_.push_back(windows_.size());
    windows_.emplace_back();
  }
  const std::size_t index = free_.back();
  Window& window = windows_[index];
  free_.pop_back();
  window.wanted = true;
  window.grant = grant;
  window.range = range;
  by_grant_[grant] = index;
  (window.window ? waiting_ : unmade_).push_back(index);
}

std::vector<std::uint64_t> PathWindows::add(std::vector<MemoryWindow> made, std::size_t asked) {
  std::vector<std::uint64_t> without;
  for (std::size_t i = 0; i < asked; ++i) {
    const std::size_t index = unmade_.front();
    unmade_.pop_front();
    Window& window = windows_[index];
    if (i < made.size()) {
      window.window = std::move(made[i]);
      waiting_.push_back(index);
      continue;
    }
    if (std::exchange(window.wanted, false)) {
      by_grant_.erase(window.grant);
      without.push_back(window.grant);
    }
    make_free(index);
  }
  return without;
}

void PathWindows::close(std::uint64_t grant) {
  thread_.check("PathWindows");
  const auto found = by_grant_.find(grant);
  if (found == by_grant_.end()) return;
  const std::size_t index = found->second;
  by_grant_.erase(found);
  windows_[index].wanted = false;
  // A window that is being opened is closed once it is open; one that waits is queued already.
  if (windows_[index].state == State::open) waiting_.push_back(index);
}

int PathWindows::post() {
  thread_.check("PathWindows");
  while (!waiting_.empty() && requests_ < kMaxRequests) {
    const std::size_t index = waiting_.front();
    waiting_.pop_front();
    Window& window = windows_[index];
    const bool open = window.state == State::open;
    if (!open && !window.wanted) {  // closed before it was opened
      make_free(index);
      continue;
    }
    if (const int error = post_request(index)) return error;
    window.state = open ? State::closing : State::opening;
    ++requests_;
  }
  return 0;
}

int PathWindows::post_request(std::size_t index) {
  Window& window = windows_[index];
  ibv_send_wr request{.wr_id = kRequest | index, .send_flags = IBV_SEND_SIGNALED};
  if (window.wanted) {
    request.opcode = IBV_WR_BIND_MW;
    request.bind_mw = {.mw = window.window.get(),
                       .rkey = ibv_inc_rkey(window.window->rkey),
                       .bind_info = {.mr = window.range.region,
                                     .addr = window.range.address,
                                     .length = window.range.length,
                                     .mw_access_flags = IBV_ACCESS_REMOTE_WRITE}};
  } else {
    request.opcode = IBV_WR_LOCAL_INV;
    request.invalidate_rkey = window.window->rkey;
  }
  ibv_send_wr* refused = nullptr;
  const int error = ibv_post_send(pair_, &request, &refused);
  // Drivers leave it to the caller to record the window's new key.
  if (error == 0 && window.wanted) window.window->rkey = request.bind_mw.rkey;
  return error;
}

std::optional<std::uint64_t> PathWindows::on_done(std::uint64_t request) {
  thread_.check("PathWindows");
  const std::size_t index = request & ~kRequest;
  assert(requests_ > 0 && index < windows_.size());
  Window& window = windows_[index];
  --requests_;
  std::optional<std::uint64_t> opened;
  if (window.state == State::closing) {
    make_free(index);
  } else {
    window.state = State::open;
    if (window.wanted) {
      opened = window.grant;
    } else {
      waiting_.push_back(index);
    }
  }
  return opened;
}

void PathWindows::make_free(std::size_t index) {
  windows_[index].state = State::free;
  free_.push_back(index);
}

std::optional<RemoteKey> PathWindows::find(std::uint64_t grant) const {
  const auto found = by_grant_.find(grant);
  if (found == by_grant_.end()) return std::nullopt;
  const Window& window = windows_[found->second];
  if (window.state != State::open || !window.window) return std::nullopt;
  return RemoteKey{.address = window.range.address, .rkey = window.window->rkey, .valid = true};
}

bool PathWindows::any_of(const ibv_mr* region) const {
  return std::any_of(windows_.begin(), windows_.end(), [&](const Window& window) {
    return window.state != State::free && window.range.region == region;
  });
}

std::vector<MemoryWindow> PathWindows::take_all() {
  std::vector<MemoryWindow> all;
  for (Window& window : windows_) {
    if (window.window) all.push_back(std::move(window.window));
  }
  return all;
}

}  // namespace kvxfer::verbs

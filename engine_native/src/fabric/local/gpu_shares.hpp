// Memory of our GPUs that GPUs of a peer on this host read. The peer opens each region once for
// each of its GPUs that reads it; a GPU other than the memory's reads a probe first. Engine thread
// only.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "domain.hpp"
#include "fabric/local/gpu_sources.hpp"
#include "fabric/local/lent_memory.hpp"
#include "fabric/local/region_message.hpp"
#include "memory_region.hpp"
#include "thread_owner.hpp"

namespace kvxfer::local {

class GpuShares {
 public:
  // `socket` and `next_number` are the path's; `next_number` is for the next region sent to the
  // peer.
  GpuShares(GpuContext context, int socket, bool same_process, PathPeer peer,
            std::uint32_t& next_number);
  GpuShares(const GpuShares&) = delete;
  GpuShares& operator=(const GpuShares&) = delete;

  // wanted: to be asked for, or asked for again, because the socket was full or a probe comes
  // first.
  enum class State : std::uint8_t { wanted, asked, opened, refused };
  struct Share {
    State state = State::asked;
    std::uint32_t number = 0;  // the region's or the probe's, for the peer
    int device = 0;            // GPU that has the memory
    int reader = 0;
    std::uint64_t asked_ns = 0;
    bool by_handle = false;
  };
  // Asks the peer to open a region, the first time, and returns its state, never `wanted`.
  // `reader`: the peer's GPU, by its number there. The state is also `refused` while opening takes
  // long, because it may itself wait for a transfer.
  Share find(const MemoryRegion& region, int reader);
  void on_answer(const RegionMessage& answer, std::string_view reason);
  // Forgets a region that ends. Returns the numbers that the peer has to forget.
  std::vector<std::uint32_t> forget(const MemoryRegion& region);
  // Ends all shares, as the path ends. Returns the loans of all memory that the peer may have open
  // by handles.
  std::vector<LentMemory::LoanId> ask_all_back();

 private:
  using Key = std::pair<std::uint64_t, int>;  // region key, reading GPU
  using MakeFiles = std::function<Result<cuda::FileParts>()>;

  Share in_time(Share share);
  bool ask(const MemoryRegion& region, const Share& share, bool with_files);
  void ask_with_probe(const std::shared_ptr<cuda::Gpu>& gpu, const Share& share);
  // Asks with files, which the driver makes in the background.
  void ask_with_files(GpuRegionMessage message, MakeFiles make);
  // Returns the share or probe with this number that waits for an answer; null if it was forgotten.
  Share* asked(std::uint32_t number);
  void want_probe(Share& share);
  void refuse(Share& share, std::string_view why);
  // Reports once that transfers take the much slower way, and once more if the reason is `slow`.
  void tell(int from, int to, std::string_view why, bool slow = false);

  [[no_unique_address]] ThreadOwner thread_;
  GpuContext context_;
  int socket_;
  bool same_process_;
  PathPeer peer_;
  std::uint32_t& next_number_;
  std::map<Key, Share> shares_;
  std::map<std::uint32_t, LentMemory::LoanId> lent_;  // keyed by the numbers of forgotten regions
  std::map<std::pair<int, int>, Share> probes_;  // keyed by the GPU that is read, and its reader
  std::size_t unanswered_ = 0;
  std::uint64_t last_asked_ns_ = 0;
  std::set<std::tuple<int, int, bool>> told_;  // both GPUs, and `slow`
  std::shared_ptr<GpuShares*> self_ = std::make_shared<GpuShares*>(this);
};

}  // namespace kvxfer::local

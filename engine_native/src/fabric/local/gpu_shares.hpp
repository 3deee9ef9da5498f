// Memory of our GPUs as the GPUs of a peer on this host reach it: the peer opens each region for
// each of its GPUs that reads it, once. Another GPU than the memory's has to read a probe first.
// Engine thread only.
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
  // `socket`: of the path, as is `next_number`, that of the next region the peer hears of.
  GpuShares(GpuContext context, int socket, bool same_process, PathPeer peer,
            std::uint32_t& next_number);
  GpuShares(const GpuShares&) = delete;
  GpuShares& operator=(const GpuShares&) = delete;

  // wanted: to be asked for, again where the socket was full or a probe comes first.
  enum class State : std::uint8_t { wanted, asked, opened, refused };
  struct Share {
    State state = State::asked;
    std::uint32_t number = 0;  // of the region or the probe, for the peer
    int device = 0;            // whose memory it is
    int reader = 0;
    std::uint64_t asked_ns = 0;
    bool by_handle = false;
  };
  // How far the peer is, which is asked first: never `wanted`. `reader`: its GPU, by its number
  // there. Refused also while opening takes long: whatever it waits for may wait for a transfer.
  Share find(const MemoryRegion& region, int reader);
  void on_answer(const RegionMessage& answer, std::string_view reason);
  // The region ends. Returns the numbers that the peer has to forget.
  std::vector<std::uint32_t> forget(const MemoryRegion& region);
  // The path ends: all that the peer may have open by handles.
  std::vector<LentMemory::LoanId> ask_all_back();

 private:
  using Key = std::pair<std::uint64_t, int>;  // of the region, and the reading GPU
  using MakeFiles = std::function<Result<cuda::FileParts>()>;

  Share in_time(Share share);
  bool ask(const MemoryRegion& region, const Share& share, bool with_files);
  void ask_with_probe(const std::shared_ptr<cuda::Gpu>& gpu, const Share& share);
  // The driver makes the files in the background.
  void ask_with_files(GpuRegionMessage message, MakeFiles make);
  // What has that number and waits for an answer; null where it was forgotten meanwhile.
  Share* asked(std::uint32_t number);
  void want_probe(Share& share);
  void refuse(Share& share, std::string_view why);
  // Said once, as it is much slower; once again where it was `slow` to be refused.
  void tell(int from, int to, std::string_view why, bool slow = false);

  [[no_unique_address]] ThreadOwner thread_;
  GpuContext context_;
  int socket_;
  bool same_process_;
  PathPeer peer_;
  std::uint32_t& next_number_;
  std::map<Key, Share> shares_;
  std::map<std::uint32_t, LentMemory::LoanId> lent_;  // by the number of what was forgotten
  std::map<std::pair<int, int>, Share> probes_;       // by the GPU that is read and its reader
  std::size_t unanswered_ = 0;
  std::uint64_t last_asked_ns_ = 0;
  std::set<std::tuple<int, int, bool>> told_;  // between which GPUs, and whether that was slow
  std::shared_ptr<GpuShares*> self_ = std::make_shared<GpuShares*>(this);
};

}  // namespace kvxfer::local

// Memory of our GPUs that peers on this host have open by CUDA IPC handles and are asked to close:
// CUDA forbids freeing it before (cuIpcOpenMemHandle). Engine thread only.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "fd.hpp"
#include "memory_region.hpp"
#include "poller.hpp"
#include "thread_owner.hpp"

namespace kvxfer::local {

class LentMemory {
 public:
  // Memory that a peer is asked to close.
  struct Loan {
    std::uint64_t region;  // the region's key
    std::string peer;      // the peer's label
    std::uint64_t asked_ns;
  };
  using LoanId = std::list<Loan>::iterator;

  explicit LentMemory(Poller& poller);
  ~LentMemory();
  LentMemory(const LentMemory&) = delete;
  LentMemory& operator=(const LentMemory&) = delete;

  LoanId ask_back(std::uint64_t region, std::string peer);
  void give_back(LoanId loan);
  // Ends the loans of a path that ends, when the peer closes its end of the socket: it has closed
  // all memory then.
  void give_back_at_end(std::shared_ptr<UniqueFd> socket, std::vector<LoanId> loans);

  // Returns the latest loan of the region, which has the most time left; null if there is none.
  const Loan* of(const MemoryRegion& region) const;
  const std::list<Loan>& all() const { return loans_; }

 private:
  struct Ended;
  void end(Ended& path);

  [[no_unique_address]] ThreadOwner thread_;
  Poller& poller_;
  std::list<Loan> loans_;
  std::vector<std::unique_ptr<Ended>> ended_;
};

}  // namespace kvxfer::local

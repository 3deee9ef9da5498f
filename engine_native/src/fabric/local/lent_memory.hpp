// Memory of our GPUs that peers of this host have open by CUDA IPC handles, and are to close: CUDA
// does not allow it to be freed before (cuIpcOpenMemHandle). Engine thread only.
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
  // That a peer is asked to close.
  struct Loan {
    std::uint64_t region;  // its key
    std::string peer;      // its label
    std::uint64_t asked_ns;
  };
  using LoanId = std::list<Loan>::iterator;

  explicit LentMemory(Poller& poller);
  ~LentMemory();
  LentMemory(const LentMemory&) = delete;
  LentMemory& operator=(const LentMemory&) = delete;

  LoanId ask_back(std::uint64_t region, std::string peer);
  void give_back(LoanId loan);
  // The path to that peer ends: it has closed them all when its end of the socket is closed.
  void give_back_at_end(std::shared_ptr<UniqueFd> socket, std::vector<LoanId> loans);

  // The latest, which has the most time left; null where there is none.
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

#include "fabric/local/lent_memory.hpp"

#include <algorithm>
#include <utility>

#include "clock.hpp"
#include "fabric/local/unix_socket.hpp"

namespace kvxfer::local {

// The socket of a path that has ended.
struct LentMemory::Ended final : EventSink {
  Ended(LentMemory& in, std::shared_ptr<UniqueFd> its_socket, std::vector<LoanId> its_loans)
      : lent(in), socket(std::move(its_socket)), loans(std::move(its_loans)) {}
  ~Ended() { lent.poller_.remove(socket->get(), *this); }
  Ended(const Ended&) = delete;
  Ended& operator=(const Ended&) = delete;

  void on_events(std::uint32_t) override {
    while (true) {
      bool lacking = false;
      const auto message = receive_message(socket->get(), &lacking);
      if (!message) return lent.end(*this);
      if (message->bytes.empty()) return;
    }
  }

  LentMemory& lent;
  std::shared_ptr<UniqueFd> socket;
  std::vector<LoanId> loans;
};

LentMemory::LentMemory(Poller& poller) : poller_(poller) {}
LentMemory::~LentMemory() = default;

LentMemory::LoanId LentMemory::ask_back(std::uint64_t region, std::string peer) {
  thread_.check("LentMemory");
  return loans_.insert(loans_.end(), {region, std::move(peer), now_ns()});
}

void LentMemory::give_back(LoanId loan) {
  thread_.check("LentMemory");
  loans_.erase(loan);
}

void LentMemory::give_back_at_end(std::shared_ptr<UniqueFd> socket, std::vector<LoanId> loans) {
  thread_.check("LentMemory");
  if (loans.empty()) return;
  auto ended = std::make_unique<Ended>(*this, std::move(socket), std::move(loans));
  // If the socket cannot be watched, the loans stay.
  const auto added = poller_.add(ended->socket->get(), EPOLLIN, *ended);
  if (added) ended_.push_back(std::move(ended));
}

void LentMemory::end(Ended& path) {
  for (const LoanId loan : path.loans) loans_.erase(loan);
  std::erase_if(ended_, [&path](const auto& each) { return each.get() == &path; });
}

const LentMemory::Loan* LentMemory::of(const MemoryRegion& region) const {
  thread_.check("LentMemory");
  const auto found = std::find_if(loans_.rbegin(), loans_.rend(), [&region](const Loan& loan) {
    return loan.region == region.key();
  });
  return found == loans_.rend() ? nullptr : &*found;
}

}  // namespace kvxfer::local

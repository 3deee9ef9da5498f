// Dispatch and combine of MoE token rows between the ranks of a group: see docs/architecture.md.
//
// A step: dispatch_send, dispatch_wait, place, combine_send, combine_wait, combine. All ranks go
// through the same steps in the same order, each in the slot that its caller names. A call out of
// this order fails with invalid-argument, and changes nothing. Error texts name the calls of
// kvxfer.moe: dispatch_recv() is dispatch_wait and place, combine_recv() combine_wait and combine.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fd.hpp"
#include "kvxfer/engine.hpp"
#include "moe/own_memory.hpp"
#include "moe/shape.hpp"
#include "moe/step.hpp"
#include "thread_owner.hpp"

namespace kvxfer::moe {

struct Options {
  Duration spin{};  // how long a wait polls before it sleeps; 0: not at all
  Duration timeout = std::chrono::seconds(30);  // a write's; room to write is awaited twice as long
};

enum class Waited : std::uint8_t {
  done,
  left_out,  // no rank runs the step, which is over
  events,    // events() may concern this step: take them, then wait again
  deadline,
};

// One thread at a time. Drains the engine's completions: nothing else may.
class Exchange {
 public:
  // The engine must outlive the exchange, and have a thread.
  static Result<std::unique_ptr<Exchange>> create(TransferEngine& engine, Shape shape,
                                                  Options options);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  const Shape& shape() const { return shape_; }
  // See TransferEngine.
  Result<void> require_own_process() const { return engine_.require_own_process(); }

  // --- pairs, between steps. Ranks on this host give each other their memory and doorbell (both
  // ways), the others their terms.
  int memory_fd() const;
  std::size_t memory_bytes() const;
  int doorbell_fd() const;
  Result<void> add_local(std::uint32_t rank, PeerId peer, UniqueFd memory, std::size_t bytes,
                         UniqueFd doorbell);
  // Allocates an inbox for the writes of that rank. Returns opaque terms to give to it.
  Result<std::string> open_remote(std::uint32_t rank, PeerId peer);
  // Takes what open_remote() returned there, for this rank. Both calls are needed, in any order.
  Result<void> add_remote(std::uint32_t rank, PeerId peer, std::string_view terms);
  // Removes the rank, which then counts as lost, and releases its memory.
  void remove(std::uint32_t rank);
  // Returns by part the bytes that the exchange has allocated, or will allocate at most.
  std::vector<std::pair<std::string, std::uint64_t>> memory_parts() const;

  // --- views
  // Sets the view, whose alive ranks must have been added. Posts dispatches of steps from
  // first_step on again. The first view also sets the next step to first_step.
  Result<void> set_view(const View& view, std::uint64_t first_step);
  std::uint64_t next_step() const { return next_step_; }
  // Declares that no rank runs this step, before the view that leaves it out. If dispatch_send()
  // has taken the step, or takes it later, dispatch_wait() returns left_out, which frees the slot.
  Result<void> leave_out(std::uint64_t step);
  // Skips the next step, which no rank runs: dispatch_send() does not take it here.
  void skip_step();
  // Sets, by rank, the number of its host. Ranks of one host must have added each other as local.
  // Until the first call, each rank is on another host. From the next dispatch on, rows for several
  // ranks of another host go to one of them, if that is fewer rows; the others read them there.
  Result<void> set_hosts(std::vector<std::uint32_t> hosts);
  // Returns the ranks that are alive in the view and were lost since.
  std::vector<std::uint32_t> lost() const;
  // Returns the last loss of this rank; Errc::ok if there was none.
  Error why_lost(std::uint32_t rank) const;

  // --- a step
  // Returns room for max_tokens rows of the input dtype. Rows of x that lie here are not copied if
  // the wire takes them as they are. The caller must not write here from dispatch_send() to
  // combine().
  Result<std::byte*> input(std::uint32_t slot);
  // Fail, naming the next call, unless it is dispatch_send(), or combine_send(), in this slot.
  Result<void> check_free(std::uint32_t slot) const;
  Result<void> check_placed(std::uint32_t slot) const;
  // Returns the step's number. A refused call changes nothing.
  Result<std::uint64_t> dispatch_send(std::uint32_t slot, const Tokens& tokens);
  // Waits for all rows of the step, except those of lost ranks. `timeout` 0: only checks.
  Result<Waited> dispatch_wait(std::uint32_t slot, Duration timeout);
  Result<const Arrival*> arrival(std::uint32_t slot) const;
  // Returns room for ranks * max_tokens rows of the combine dtype, for x of place() and for y of
  // combine_send() by_source: rows of y that lie here are not copied. Null if such rows are no
  // multiple of 64 bytes. The caller may write here from place() until combine_send().
  Result<std::byte*> answers(std::uint32_t slot);
  // Places the rows of the step. by_expert: the rows of expert e from begins[e] on, by source rank,
  // then token. by_source: the rows of source s from begins[s] on, by token; ids [rows, top_k]
  // (local experts; -1: none) and weights [rows, top_k] describe them. `scales` only for a wire
  // with scales, ids and weights only by_source. Rows between these are not touched. A rank that
  // has given this one up meanwhile is lost: its rows are zero, and arrival() says missing.
  Result<void> place(std::uint32_t slot, Order order, std::span<const std::int64_t> begins, void* x,
                     float* scales, std::int32_t* ids, float* weights);
  // Sends y: rows of the combine dtype, at the places of x in place(). by_source, each must be the
  // weighted sum of its local experts already. Rows may lie in answers() only by_source, and then
  // all of y must lie there.
  Result<void> combine_send(std::uint32_t slot, const void* y);
  Result<Waited> combine_wait(std::uint32_t slot, Duration timeout);
  // Writes out [count, hidden] of the output dtype: for each token the sum over the ranks, in
  // order. Returns, by rank, true if it had tokens of this rank and its rows are missing. Ends the
  // step.
  Result<std::vector<bool>> combine(std::uint32_t slot, void* out);
  // Returns the ranks that the wait in this slot is for.
  std::vector<std::uint32_t> awaited(std::uint32_t slot) const;

  // Returns completions that are not the exchange's, and all peer_down.
  std::vector<Completion> events();
  // True if there are no events, and no rank of the view is lost.
  bool quiet();

 private:
  struct Posted {
    std::uint32_t slot;
    Direction direction;
  };

  Exchange(TransferEngine& engine, Shape shape, Options options, OwnMemory own);

  Result<void> check_new(std::uint32_t rank, PeerId peer) const;
  Result<void> check_view(const View& view, std::uint64_t first_step) const;
  Result<void> check_tokens(const Tokens& tokens) const;
  // True if the rows lie in answers(). Fails if rows in this order may not lie there.
  Result<bool> in_answers(std::uint32_t slot, Order order, const void* rows) const;
  // Returns the step in this slot, if it is in one of these phases.
  Result<Step*> step_in(std::uint32_t slot, const char* call, Step::Phase phase, Step::Phase other);
  Result<void> require_phase(std::uint32_t slot, const char* call, Step::Phase phase,
                             Step::Phase other) const;
  // Releases what the step holds.
  void end(std::uint32_t slot, Step::Phase phase);
  Result<EngineWay*> remote(std::uint32_t rank, PeerId peer);
  std::shared_ptr<Counterpart> of_peer(PeerId peer) const;
  void lose(Counterpart& pair, Error why);
  void drain();

  // Sends the step by routes_. `tokens` null: its rows are packed already.
  void send(std::uint32_t slot, const Tokens* tokens);
  // Decides which ranks get their rows through another rank of their host.
  void choose_ways(Step& step);
  // Collects in tokens_ the tokens of the step that go to one of these ranks.
  void gather_tokens(const Step& step, std::span<const std::uint32_t> ranks);
  void post_dispatch(std::uint32_t slot, const Step& step, std::uint32_t rank);
  void post_combine(std::uint32_t slot, const Part& part);
  void posted(std::uint32_t slot, Direction direction, Counterpart& pair,
              const Result<void>& result);
  // Sends rows directly that went through ranks that were lost.
  void reroute();
  // Checks every dispatch of another host that has not arrived: neighbours may wait for it, too.
  void look_for_neighbours();
  // Tells neighbours that a dispatch of `from` is in an inbox here.
  void tell_neighbours(std::uint32_t slot, std::uint64_t key, const Counterpart& from);
  // Takes a dispatch from a neighbour's inbox, if it is there.
  void take_from_neighbours(std::uint32_t slot, const Step& step, Part& part);
  // Returns once no operation reads the memory of this slot and direction.
  Result<void> await_sent(std::uint32_t slot, Direction direction);
  // Check for the message. True if this rank need not be waited for (any longer).
  bool dispatched(std::uint32_t slot, const Step& step, Part& part);
  bool combined(std::uint32_t slot, const Step& step, Part& part);
  template <class Ready>
  Result<Waited> wait(Duration timeout, bool for_events, const Ready& ready);

  TransferEngine& engine_;
  const Shape shape_;
  const Options options_;
  // Ranks from the next one on, this one last, so that not all begin with the same one.
  std::vector<std::uint32_t> others_first_;
  OwnMemory own_;
  RegionPtr own_region_;                             // once there is a remote rank
  std::vector<std::shared_ptr<Counterpart>> pairs_;  // by rank
  std::vector<std::uint32_t> hosts_;                 // by rank
  std::vector<Error> why_lost_;                      // by rank
  bool reroute_ = false;                             // a rank was lost
  std::optional<View> view_;
  std::uint64_t next_step_ = 0;
  std::set<std::uint64_t> left_out_;            // steps from the next one on
  std::vector<Step> steps_;                     // by slot
  std::vector<std::vector<std::byte>> inputs_;  // by slot, if input rows lie apart
  std::unordered_map<OperationId, Posted> posted_;
  std::vector<std::array<std::size_t, kDirections>> sending_;  // by slot: operations under way
  std::vector<Completion> events_;
  bool closed_ = false;
  [[no_unique_address]] OneAtATime in_use_;
  // Buffers, kept between calls.
  std::vector<Routes> routes_;
  std::vector<std::uint32_t> neighbours_;
  std::vector<bool> goes_;  // by token
  std::vector<std::int64_t> tokens_;
  std::vector<OperationId> operations_;
};

}  // namespace kvxfer::moe

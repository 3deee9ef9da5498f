// A group of MoE exchanges in one process, and the expected results of its steps.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "moe/exchange.hpp"
#include "support.hpp"

namespace kvxfer::test {

float load(moe::DType type, const std::byte* from, std::size_t element);
void store(moe::DType type, std::byte* to, std::size_t element, float value);
std::byte* at(Bytes& bytes, std::size_t offset);

// One rank.
struct Member {
  Member(const std::string& fabric, const moe::Shape& of, Duration spin);
  // Waits until done, whatever events come.
  void await_dispatch(std::uint32_t slot);
  void await_combine(std::uint32_t slot);
  // Returns the id of the engine that connects to this one.
  PeerId await_peer_up();

  moe::Shape shape;
  TestEngine engine;
  std::vector<PeerId> peers;  // by rank
  std::unique_ptr<moe::Exchange> exchange;
};

// The connections of ranks: by each other's memory; by writes of their engines, over a fabric of
// conformance.hpp; or by memory within each half of the ranks, and by engines between the halves.
enum class Pairs { memory, engine, hosts };
const char* name(Pairs pairs);

// A fabric, and how the ranks of a group reach each other over it.
struct Reach {
  std::string fabric;
  Pairs pairs;
};

// Ranks that reach each other by memory, then by engines over each fabric of this run.
std::vector<Reach> all_ways();

inline const moe::Shape kThreeRanks{.ranks = 3,
                                    .experts = 6,
                                    .local_experts = {2, 2, 2},
                                    .top_k = 3,
                                    .hidden = 64,
                                    .max_tokens = 16,
                                    .slots = 2,
                                    .input = moe::DType::f32,
                                    .wire = moe::DType::f32,
                                    .combine = moe::DType::f32,
                                    .output = moe::DType::f32};

struct Group {
  // `shape` is the shape of all ranks.
  Group(const std::string& fabric, Pairs pairs, moe::Shape shape, Duration spin = {});
  // Runs `what` for each of these ranks, each in a thread.
  void each(const std::vector<std::uint32_t>& ranks,
            const std::function<void(Member& member)>& what);
  std::vector<std::uint32_t> all() const;
  // Creates this rank anew, with a pair to each of the others. No step may be under way.
  void start(std::uint32_t rank, const std::vector<std::uint32_t>& others);

  std::vector<std::unique_ptr<Member>> members;

 private:
  std::string fabric_;
  Pairs pairs_;
  moe::Shape shape_;
  Duration spin_;
};

// The tokens that a rank dispatches in a step.
struct Given {
  std::size_t count = 0;
  Bytes x;  // finite elements of the input dtype
  std::vector<float> scales;
  std::vector<std::int64_t> ids;
  std::vector<float> weights;

  moe::Tokens tokens() const;
};

// Some choices are -1, and some name an expert again. With `only`, all tokens choose only that
// expert.
Given random_given(const moe::Shape& shape, std::size_t count, Random& random,
                   std::int64_t only = -1);

// The tokens of each rank: any number of them, and of some ranks none.
std::vector<Given> random_all(const moe::Shape& shape, Random& random);

// Maps each logical expert to a different physical one of the alive ranks, or to -1 if there are
// too few.
std::vector<std::int64_t> random_table(const moe::Shape& shape, const std::vector<bool>& alive,
                                       Random& random);

// Each rank's table in a view.
struct Tables {
  Tables(const moe::Shape& shape, const std::vector<bool>& ranks, Random& random) : alive(ranks) {
    for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
      of.push_back(random_table(shape, alive, random));
    }
  }
  moe::View view(std::uint64_t number, std::uint32_t rank) const {
    return {.number = number, .alive = alive, .table = of[rank]};
  }
  std::vector<bool> alive;
  std::vector<std::vector<std::int64_t>> of;
};

// A step of all these ranks: tokens by rank, and tables by rank, as their views have them.
struct StepOf {
  const moe::Shape& shape;
  const std::vector<Given>& given;
  const std::vector<std::vector<std::int64_t>>& tables;

  // A row of the wire as it is placed: the elements' values with scales applied.
  std::vector<float> placed(std::uint32_t source, std::size_t token) const;
  // The choices of this token that go to rank `to`: local experts in the order of their first
  // choice, each with the sum of its weights.
  std::vector<moe::RouteEntry> entries(std::uint32_t source, std::size_t token,
                                       std::uint32_t to) const;
  // The result of combine() without the contributions of the missing ranks.
  std::vector<float> combined(std::uint32_t source, std::size_t token,
                              const std::vector<bool>& missing) const;
  // The local expert's result for a row.
  float expert(std::uint32_t rank, std::uint32_t local, float x) const;
};

// Places what has arrived at this rank, checks every row, and computes the input of combine_send().
// Rows of a missing source are zero. `into` is memory for x; null stands for memory of the test.
Bytes place_and_compute(const StepOf& step, Member& member, std::uint32_t slot, moe::Order order,
                        std::byte* into = nullptr);
// Combines, and checks every row of the output. Returns, by rank, whether it is missing.
std::vector<bool> combine_and_check(const StepOf& step, Member& member, std::uint32_t slot);
// Runs a whole step of one rank. Returns, by rank, whether it is missing in its combine.
std::vector<bool> whole_step(const StepOf& step, Member& member, std::uint32_t slot,
                             moe::Order order);

}  // namespace kvxfer::test

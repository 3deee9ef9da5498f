// A group of MoE exchanges in one process, and what a step of it has to give.
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
  // Of the engine that connects to this one.
  PeerId await_peer_up();

  moe::Shape shape;
  TestEngine engine;
  std::vector<PeerId> peers;  // by rank
  std::unique_ptr<moe::Exchange> exchange;
};

// How ranks reach each other: all by each other's memory; all by writes of their engines, over a
// fabric of conformance.hpp; or by memory where their ranks' halves are equal, else by engines.
enum class Pairs { memory, engine, hosts };

struct Group {
  // `shape` is that of all ranks.
  Group(const std::string& fabric, Pairs pairs, moe::Shape shape, Duration spin = {});
  // `what` for each of these ranks, each in a thread.
  void each(const std::vector<std::uint32_t>& ranks,
            const std::function<void(Member& member)>& what);
  std::vector<std::uint32_t> all() const;
  // Makes this rank anew, with a pair to each of these. No step is under way.
  void start(std::uint32_t rank, const std::vector<std::uint32_t>& others);

  std::vector<std::unique_ptr<Member>> members;

 private:
  std::string fabric_;
  Pairs pairs_;
  moe::Shape shape_;
  Duration spin_;
};

// What a rank dispatches in a step.
struct Given {
  std::size_t count = 0;
  Bytes x;  // of the input dtype; finite
  std::vector<float> scales;
  std::vector<std::int64_t> ids;
  std::vector<float> weights;

  moe::Tokens tokens() const;
};

// Some choices are -1, and some name an expert again. `only`: all tokens choose it, and nothing
// else.
Given random_given(const moe::Shape& shape, std::size_t count, Random& random,
                   std::int64_t only = -1);

// Each logical expert at one physical one of the alive ranks, no two at the same; -1 where there
// are too few.
std::vector<std::int64_t> random_table(const moe::Shape& shape, const std::vector<bool>& alive,
                                       Random& random);

// One step of all these ranks: given by rank, tables by rank (those that their views have).
struct StepOf {
  const moe::Shape& shape;
  const std::vector<Given>& given;
  const std::vector<std::vector<std::int64_t>>& tables;

  // Row of the wire as placed: the elements' values, scales applied.
  std::vector<float> placed(std::uint32_t source, std::size_t token) const;
  // The choices of this token that go to this rank: local experts in the order of their first
  // choice, each with the sum of its weights.
  std::vector<moe::RouteEntry> entries(std::uint32_t source, std::size_t token,
                                       std::uint32_t to) const;
  // What combine() gives without the contributions of the missing.
  std::vector<float> combined(std::uint32_t source, std::size_t token,
                              const std::vector<bool>& missing) const;
  // The local expert's result for a row.
  float expert(std::uint32_t rank, std::uint32_t local, float x) const;
};

// Places what has arrived at this rank, checks every row, and computes what combine_send() takes.
// Rows of a missing source are zero. `into`: room for x; null: memory of the test.
Bytes place_and_compute(const StepOf& step, Member& member, std::uint32_t slot, moe::Order order,
                        std::byte* into = nullptr);
// Combines, and checks every row of the output. By rank: what is missing.
std::vector<bool> combine_and_check(const StepOf& step, Member& member, std::uint32_t slot);

}  // namespace kvxfer::test

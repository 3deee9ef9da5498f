// MPI_Alltoallv of the rows that an exchange moves: to their ranks, and back.
//
//   alltoallv PLAN SOCKET
//
// PLAN has the bytes of a row, then how many rows each rank sends to each. Every rank connects to
// SOCKET and sends its number. It then reads orders there, each a 32-bit number of rounds, and
// answers with three times for each round (nanoseconds of CLOCK_MONOTONIC): before, between and
// after the two calls. It sleeps between orders.
#include <mpi.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <fstream>
#include <iostream>
#include <numeric>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

namespace {

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

class Orders {
 public:
  Orders(const std::string& path, std::int32_t rank) : fd_(socket(AF_UNIX, SOCK_STREAM, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.size() >= sizeof address.sun_path)
      throw std::length_error("the socket's path is long");
    std::memcpy(address.sun_path, path.data(), path.size());
    if (fd_ < 0 || connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
      throw std::system_error(errno, std::generic_category(), path);
    }
    write_all(&rank, sizeof rank);
  }
  Orders(const Orders&) = delete;
  Orders& operator=(const Orders&) = delete;
  ~Orders() { close(fd_); }

  // Returns false once there are no more.
  bool next(std::uint32_t& rounds) {
    return recv(fd_, &rounds, sizeof rounds, MSG_WAITALL) == sizeof rounds;
  }
  void answer(const std::vector<std::int64_t>& times) {
    write_all(times.data(), times.size() * sizeof times[0]);
  }

 private:
  void write_all(const void* bytes, std::size_t length) {
    const auto* at = static_cast<const std::byte*>(bytes);
    while (length > 0) {
      const ssize_t sent = send(fd_, at, length, MSG_NOSIGNAL);
      if (sent < 0) throw std::system_error(errno, std::generic_category(), "send");
      at += sent;
      length -= static_cast<std::size_t>(sent);
    }
  }
  int fd_;
};

// The rows that one rank sends to, or gets from, each rank.
struct Rows {
  explicit Rows(std::size_t ranks) : counts(ranks), begins(ranks) {}
  std::size_t finish() {
    std::exclusive_scan(counts.begin(), counts.end(), begins.begin(), 0);
    return static_cast<std::size_t>(begins.back() + counts.back());
  }
  std::vector<int> counts, begins;
};

class Exchange {
 public:
  Exchange(const std::string& plan, int rank, int ranks)
      : sent_rows_(static_cast<std::size_t>(ranks)), received_rows_(sent_rows_) {
    std::ifstream in(plan);
    std::size_t row_bytes = 0;
    in >> row_bytes;
    for (int source = 0; source < ranks; ++source) {
      for (int destination = 0; destination < ranks; ++destination) {
        int count = 0;
        in >> count;
        if (source == rank) sent_rows_.counts[static_cast<std::size_t>(destination)] = count;
        if (destination == rank) received_rows_.counts[static_cast<std::size_t>(source)] = count;
      }
    }
    if (!in) throw std::runtime_error(plan + " is too short");
    sent_.resize(sent_rows_.finish() * row_bytes);
    received_.resize(received_rows_.finish() * row_bytes);
    back_.resize(sent_.size());
    for (std::size_t i = 0; i < sent_.size(); ++i) {
      sent_[i] =
          static_cast<std::byte>((i * 131 + i / row_bytes + static_cast<std::size_t>(rank)) % 251);
    }
    MPI_Type_contiguous(static_cast<int>(row_bytes), MPI_BYTE, &row_);
    MPI_Type_commit(&row_);
  }
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;
  ~Exchange() { MPI_Type_free(&row_); }

  void dispatch() { move(sent_, sent_rows_, received_, received_rows_); }
  void combine() { move(received_, received_rows_, back_, sent_rows_); }
  bool correct() const { return back_ == sent_; }

 private:
  void move(const std::vector<std::byte>& from, const Rows& out, std::vector<std::byte>& to,
            const Rows& in) {
    MPI_Alltoallv(from.data(), out.counts.data(), out.begins.data(), row_, to.data(),
                  in.counts.data(), in.begins.data(), row_, MPI_COMM_WORLD);
  }
  Rows sent_rows_, received_rows_;
  std::vector<std::byte> sent_, received_, back_;
  MPI_Datatype row_ = MPI_DATATYPE_NULL;
};

void serve(const std::string& plan, const std::string& socket) {
  int rank = 0;
  int ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  Exchange exchange(plan, rank, ranks);
  Orders orders(socket, rank);
  std::uint32_t rounds = 0;
  while (orders.next(rounds)) {
    std::vector<std::int64_t> times;
    for (std::uint32_t round = 0; round < rounds; ++round) {
      times.push_back(now_ns());
      exchange.dispatch();
      times.push_back(now_ns());
      exchange.combine();
      times.push_back(now_ns());
    }
    if (!exchange.correct()) throw std::runtime_error("a row is not as MPI has sent it");
    orders.answer(times);
  }
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  try {
    if (argc != 3) throw std::runtime_error("use: alltoallv PLAN SOCKET");
    serve(argv[1], argv[2]);
  } catch (const std::exception& error) {
    std::cerr << "alltoallv: " << error.what() << '\n';
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return 0;
}

// A lane of the tcp fabric: the peer sends frames, sound and unsound ones, while this end posts
// writes and takes memory back; in host memory and in a GPU's.
#include <sys/socket.h>

#include "bootstrap/bytes.hpp"
#include "fabric/tcp/tcp_domain.hpp"
#include "targets.hpp"
#include "world.hpp"

namespace kvxfer::fuzz {
namespace {

class Lane {
 public:
  explicit Lane(World::Place place) : world_(place) {
    int ends[2];
    require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0,
            "the system has sockets");
    peer_ = UniqueFd(ends[1]);
    auto path = domain_.open_path(UniqueFd(ends[0]), {kPeer, "peer"});
    require(static_cast<bool>(path), "a lane can be opened");
    path_ = std::move(*path);
  }

  void act(Input& input) {
    switch (input.below(9)) {
      case 0:
        return send_writes(input);
      case 1:
        return send(input.text());
      case 2:
        return send_ack(input);
      case 3:
        return step();
      case 4:
        return post(input);
      case 5:
        return release();
      case 6:
        return deregister();
      case 7:
        return drain();
      case 8:
        ::shutdown(peer_.get(), SHUT_WR);
    }
  }

  void finish() {
    for (int i = 0; i < 4; ++i) {
      step();
      world_.wait_for_copies();
    }
    release();
    path_.reset();
    world_.wait_for_copies();
  }

 private:
  void step() {
    world_.gpus().poll();
    domain_.poll();
    world_.poller.poll(0);
  }

  void send(std::string_view bytes) {
    (void)!::send(peer_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  void send_writes(Input& input) {
    tcp::FrameHeader header{.type = static_cast<std::uint8_t>(tcp::FrameType::writes)};
    header.key_or_sequence = world_.key(input);
    header.has_imm = input.byte() & 3;
    if (header.has_imm) header.imm = world_.imm(input);
    const std::size_t count = input.byte() % 16u;
    header.count =
        input.byte() == 0xff ? input.get<std::uint32_t>() : static_cast<std::uint32_t>(count);
    ByteWriter more;
    std::uint64_t bytes = 0;
    for (std::size_t i = 0; i < std::max<std::size_t>(count, 1); ++i) {
      tcp::WriteDescriptor write{};
      write.offset = input.flag() ? input.number() : input.get<std::uint16_t>();
      write.length = input.flag() ? input.byte() : input.get<std::uint16_t>();
      if (write.length == 0xffff) write.length = input.get<std::uint32_t>();
      bytes += write.length;
      if (i == 0) header.first = write;
      if (i > 0) more.put(write);
    }
    // Payload is sometimes too short, so that the next frame is taken for the rest.
    const std::size_t missing = input.byte() == 0xff ? input.byte() : 0;
    const std::size_t payload = std::min<std::uint64_t>(bytes, 32768);
    send(ByteWriter().put(header).take() + more.take() +
         std::string(payload - std::min(payload, missing), 'p'));
  }

  void send_ack(Input& input) {
    tcp::FrameHeader header{.type = static_cast<std::uint8_t>(tcp::FrameType::ack)};
    header.key_or_sequence = input.number();
    header.status = static_cast<std::uint16_t>(input.number());
    send(ByteWriter().put(header).take());
  }

  void post(Input& input) {
    RegionPtr from = input.flag() ? source() : nullptr;
    const std::uint64_t key = world_.key(input);
    const auto operation = world_.operation(input, std::move(from), key);
    if (!path_->has_room(*operation, true)) return;
    operations_.push_back(operation);
    operation->took(path_->post(operation, operation->next()));
  }

  RegionPtr source() {
    if (world_.on_gpu()) return Device::only().source;
    auto region = MemoryRegion::wrap({}, source_.data(), source_.size());
    return region ? *region : nullptr;
  }

  void release() {
    world_.release([this] {
      path_->revoke_counter(world_.granted_imm);
      path_->revoke_region(world_.granted->key());
    });
  }

  void deregister() {
    world_.deregister([this] { path_->revoke_region(world_.open->key()); });
  }

  void drain() {
    std::array<char, 4096> buffer;
    while (::recv(peer_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT) > 0) {
    }
  }

  World world_;
  Books books_;
  std::array<std::byte, 4096> source_{};
  std::vector<OperationPtr> operations_;
  UniqueFd peer_;
  tcp::TcpDomain domain_{world_.poller, world_.receive_context(), books_, 1u << 16};
  std::unique_ptr<Path> path_;
};

void run_on_lane(World::Place place, std::string_view bytes) {
  Input input(bytes);
  Lane lane(place);
  while (!input.empty()) lane.act(input);
  lane.finish();
}

}  // namespace

void tcp_lane(std::string_view bytes) { run_on_lane(World::Place::host, bytes); }
void tcp_lane_gpu(std::string_view bytes) { run_on_lane(World::Place::gpu, bytes); }

}  // namespace kvxfer::fuzz

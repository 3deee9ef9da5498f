#include "fabric/null/null_domain.hpp"

namespace kvxfer::null {
namespace {

class NullRegistration final : public NicRegistration {
 public:
  Result<RemoteKey> share(PeerId) override { return RemoteKey{.valid = true}; }
  void unshare(PeerId) override {}
  Result<void> close() override { return {}; }
};

class NullPath final : public NicPath {
 public:
  NullPath(NicPathIdentity identity, NicLoad& load, const NicContext& context,
           std::vector<NullPath*>& paths)
      : NicPath(std::move(identity), 0, load, context.receive_context, context.events),
        paths_(paths) {
    set_peer_imm_window(UINT64_MAX);  // none ever gets there
    paths_.push_back(this);
  }
  ~NullPath() override { std::erase(paths_, this); }

  std::string_view fabric() const override { return "null"; }
  std::string endpoint() const override { return {}; }
  void connect(std::string_view, Connected then) override { then({}); }
  void shut(std::function<void()> then) override { then(); }

  // Looks at every write, as a NIC's driver would.
  std::size_t post(const OperationPtr& operation, const WriteRange& writes) override {
    std::uint64_t bytes = 0;
    for (std::size_t i = 0; i < writes.count; ++i) {
      bytes += operation->writes[writes.first + i].length;
    }
    add_batch(operation, writes, bytes);
    return writes.count;
  }

  void poll() { finish_through(UINT64_MAX); }

 private:
  std::vector<NullPath*>& paths_;
};

class NullDomain final : public NicDomain {
 public:
  explicit NullDomain(const NicContext& context) : context_(context) {}

  std::string_view fabric() const override { return "null"; }
  const NicInfo& info() const override { return info_; }
  bool usable() const override { return true; }
  Result<std::shared_ptr<NicRegistration>> register_memory(const MemoryRegion&) override {
    return std::shared_ptr<NicRegistration>(std::make_shared<NullRegistration>());
  }
  void open_path(NicPathIdentity identity, Opened then) override {
    then(std::unique_ptr<NicPath>(
        std::make_unique<NullPath>(std::move(identity), load_, context_, paths_)));
  }
  void poll() override {
    for (NullPath* path : paths_) path->poll();
  }
  bool prepare_sleep() override { return load_.bytes == 0; }
  void finish_sleep() override {}

 private:
  NicContext context_;
  NicInfo info_{.name = "null", .network = "null", .bits_per_second = 1'000'000'000'000u};
  NicLoad load_{.bits_per_second = info_.bits_per_second};
  std::vector<NullPath*> paths_;  // owned by their links
};

}  // namespace

Result<OpenedNics> NullFactory::open(const NicContext& context) {
  OpenedNics opened;
  opened.nics.push_back(std::make_unique<NullDomain>(context));
  return opened;
}

}  // namespace kvxfer::null

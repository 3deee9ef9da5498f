#include "kvxfer/types.hpp"

#include <charconv>
#include <cstring>

namespace kvxfer {
namespace {

constexpr std::string_view kScheme = "kvx://";
// The start of descriptors of host memory and of a GPU's; a GPU's number is the latter's fourth
// byte.
constexpr std::string_view kHostMagic{"KMR\x01", 4};
constexpr std::string_view kCudaMagic{"KMG", 3};
// The upper half of a grant, above its immediate. Older engines have the address of the memory in
// place of both, and no address of a process begins so.
constexpr std::uint64_t kGrant = std::uint64_t{0xffffffff} << 32;

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

Error bad_address(std::string_view text) {
  return {Errc::invalid_argument, "engine address '" + std::string(text.substr(0, 120)) +
                                      "' is not of the form kvx://HOST:PORT/ENGINE_ID"};
}

}  // namespace

std::string EngineId::hex() const {
  static constexpr char digits[] = "0123456789abcdef";
  std::string text;
  text.reserve(bytes.size() * 2);
  for (const auto byte : bytes) {
    text.push_back(digits[byte >> 4]);
    text.push_back(digits[byte & 15]);
  }
  return text;
}

Result<EngineId> EngineId::from_hex(std::string_view text) {
  EngineId id;
  if (text.size() == id.bytes.size() * 2) {
    bool good = true;
    for (std::size_t i = 0; i < id.bytes.size(); ++i) {
      const int high = hex_digit(text[2 * i]);
      const int low = hex_digit(text[2 * i + 1]);
      good = good && high >= 0 && low >= 0;
      id.bytes[i] = static_cast<std::uint8_t>(high * 16 + low);
    }
    if (good) return id;
  }
  return Error{Errc::invalid_argument, "engine id '" + std::string(text.substr(0, 80)) +
                                           "' is not 32 lower-case hexadecimal digits"};
}

std::string EngineAddress::text() const {
  const bool v6 = host.find(':') != std::string::npos;
  return std::string(kScheme) + (v6 ? "[" + host + "]" : host) + ":" + std::to_string(port) + "/" +
         engine.hex();
}

Result<EngineAddress> EngineAddress::parse(std::string_view text) {
  if (!text.starts_with(kScheme)) return bad_address(text);
  const auto rest = text.substr(kScheme.size());
  const auto slash = rest.rfind('/');
  if (slash == std::string_view::npos) return bad_address(text);
  const auto endpoint = rest.substr(0, slash);
  const auto colon = endpoint.rfind(':');
  if (colon == std::string_view::npos || colon == 0) return bad_address(text);
  auto host = endpoint.substr(0, colon);
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  const auto port = endpoint.substr(colon + 1);
  EngineAddress address;
  address.host = host;
  const auto [end, status] = std::from_chars(port.data(), port.data() + port.size(), address.port);
  if (status != std::errc() || end != port.data() + port.size() || address.port == 0 ||
      host.empty()) {
    return bad_address(text);
  }
  auto id = EngineId::from_hex(rest.substr(slash + 1));
  if (!id) return bad_address(text);
  address.engine = *id;
  return address;
}

std::string MrDescriptor::encode() const {
  std::string bytes(kBytes, '\0');
  char* out = bytes.data();
  if (kind == MemoryKind::host) {
    std::memcpy(out, kHostMagic.data(), 4);
  } else {
    std::memcpy(out, kCudaMagic.data(), 3);
    std::memcpy(out + 3, &device, 1);
  }
  std::memcpy(out + 4, engine.bytes.data(), 16);
  std::memcpy(out + 20, &key, 8);
  const std::uint64_t grant = imm == 0 ? 0 : kGrant | imm;
  std::memcpy(out + 28, &grant, 8);
  std::memcpy(out + 36, &length, 8);
  return bytes;
}

Result<MrDescriptor> MrDescriptor::decode(std::string_view bytes) {
  const bool host = bytes.starts_with(kHostMagic);
  if (bytes.size() != kBytes || !(host || bytes.starts_with(kCudaMagic))) {
    return Error{Errc::invalid_argument,
                 "not a memory region descriptor (" + std::to_string(bytes.size()) +
                     " bytes); pass MemoryRegion.descriptor of the receiving engine unchanged"};
  }
  MrDescriptor descriptor;
  if (!host) {
    descriptor.kind = MemoryKind::cuda;
    std::memcpy(&descriptor.device, bytes.data() + 3, 1);
  }
  std::memcpy(descriptor.engine.bytes.data(), bytes.data() + 4, 16);
  std::memcpy(&descriptor.key, bytes.data() + 20, 8);
  std::uint64_t grant = 0;
  std::memcpy(&grant, bytes.data() + 28, 8);
  if ((grant & kGrant) == kGrant) descriptor.imm = static_cast<Imm>(grant);
  std::memcpy(&descriptor.length, bytes.data() + 36, 8);
  return descriptor;
}

}  // namespace kvxfer

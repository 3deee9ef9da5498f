#include "bootstrap/authenticator.hpp"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include "random.hpp"

namespace kvxfer {

Mac hmac_sha256(std::string_view key, std::string_view purpose, std::string_view data) {
  // The purpose separates the uses of one key; the zero byte ends it unambiguously.
  std::string message(purpose);
  message.push_back('\0');
  message.append(data);
  Mac mac{};
  unsigned size = 0;
  if (!::HMAC(::EVP_sha256(), key.data(), static_cast<int>(key.size()),
              reinterpret_cast<const unsigned char*>(message.data()), message.size(), mac.data(),
              &size) ||
      size != mac.size()) {
    random_bytes(mac.data(), mac.size());  // equal to nothing: authentication fails closed
  }
  return mac;
}

bool equal(const Mac& a, const Mac& b) {
  return ::CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace kvxfer

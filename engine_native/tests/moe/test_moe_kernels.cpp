#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "moe/element.hpp"
#include "moe/kernels.hpp"
#include "moe/row_format.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::moe;
using namespace kvxfer::test;

namespace {

constexpr std::array kTypes{DType::f32, DType::bf16, DType::f16, DType::f8_e4m3};
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<Simd> instruction_sets() {
  std::vector<Simd> sets{Simd::portable};
  if (best_simd() != Simd::portable) sets.push_back(best_simd());
  return sets;
}

// A narrow type by its definition: sign, exponent, mantissa.
struct Narrow {
  DType type;
  int exponent_bits, mantissa_bits;
  bool infinities;

  unsigned sign() const { return 1U << (exponent_bits + mantissa_bits); }
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  // Returns the bits of the largest finite value.
  unsigned largest() const {
    const unsigned all = sign() - 1;
    return infinities ? all - (1U << mantissa_bits) : all - 1;
  }
  // Returns a finite value, or the value that would follow the largest.
  double value(unsigned bits) const {
    const unsigned magnitude = bits & (sign() - 1);
    const auto exponent = static_cast<int>(magnitude >> mantissa_bits);
    const double mantissa = magnitude & ((1U << mantissa_bits) - 1);
    const double whole = exponent == 0 ? mantissa : mantissa + std::ldexp(1, mantissa_bits);
    const double value = std::ldexp(whole, std::max(exponent, 1) - bias() - mantissa_bits);
    return (bits & sign()) != 0 ? -value : value;
  }
};

constexpr std::array kNarrow{Narrow{DType::bf16, 8, 7, true}, Narrow{DType::f16, 5, 10, true},
                             Narrow{DType::f8_e4m3, 4, 3, false}};

template <class T>
std::byte* bytes_of(std::vector<T>& values) {
  return reinterpret_cast<std::byte*>(values.data());
}
template <class T>
const std::byte* bytes_of(const std::vector<T>& values) {
  return reinterpret_cast<const std::byte*>(values.data());
}

std::vector<float> widened(DType type, const Bytes& elements, Simd simd) {
  std::vector<float> values(elements.size() / size_of(type));
  convert(bytes_of(values), DType::f32, elements.data(), type, values.size(), simd);
  return values;
}

Bytes narrowed(DType type, const std::vector<float>& values, Simd simd) {
  Bytes elements(values.size() * size_of(type));
  convert(elements.data(), type, bytes_of(values), DType::f32, values.size(), simd);
  return elements;
}

unsigned bits_at(DType type, const Bytes& elements, std::size_t i) {
  unsigned bits = 0;
  std::memcpy(&bits, elements.data() + i * size_of(type), size_of(type));
  return bits;
}

// All values of a type, in the order of their bits.
Bytes all_of(const Narrow& narrow) {
  Bytes elements(2 * narrow.sign() * size_of(narrow.type));
  for (unsigned bits = 0; bits < 2 * narrow.sign(); ++bits) {
    std::memcpy(elements.data() + bits * size_of(narrow.type), &bits, size_of(narrow.type));
  }
  return elements;
}

bool same_bits(float a, float b) {
  return std::bit_cast<unsigned>(a) == std::bit_cast<unsigned>(b);
}

// Normal values of both signs over some orders of magnitude, all of them in every type.
std::vector<float> moderate(Random& random, std::size_t n) {
  std::vector<float> values(n);
  for (float& value : values) {
    const auto fraction = static_cast<float>(random.below(1U << 24)) * 0x1p-24F;
    value = std::ldexp(1 + fraction, static_cast<int>(random.below(10)) - 6);
    if (random.below(2) == 0) value = -value;
  }
  return values;
}

// The distance to the next value of a type, at this one.
double unit_in_last_place(DType type, double value) {
  const int mantissa = type == DType::f32    ? 23
                       : type == DType::bf16 ? 7
                       : type == DType::f16  ? 10
                                             : 3;
  const int least = type == DType::f16 ? -14 : type == DType::f8_e4m3 ? -6 : -126;
  return std::ldexp(1, std::max(value == 0 ? least : std::ilogb(value), least) - mantissa);
}

}  // namespace

TEST_CASE("every value of a narrow type is widened to the f32 that equals it") {
  for (const Simd simd : instruction_sets()) {
    for (const Narrow& narrow : kNarrow) {
      CAPTURE(name_of(narrow.type));
      CAPTURE(static_cast<int>(simd));
      const auto values = widened(narrow.type, all_of(narrow), simd);
      std::size_t wrong = 0;
      for (unsigned bits = 0; bits < values.size(); ++bits) {
        const unsigned magnitude = bits & (narrow.sign() - 1);
        const bool negative = (bits & narrow.sign()) != 0;
        const float value = values[bits];
        bool right = std::signbit(value) == negative;
        if (magnitude <= narrow.largest()) {
          right &= static_cast<double>(value) == narrow.value(bits);
        } else if (narrow.infinities && magnitude == narrow.largest() + 1) {
          right &= std::isinf(value);
        } else {
          right &= std::isnan(value);
        }
        wrong += right ? 0 : 1;
      }
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("narrowing rounds to nearest, ties to even, at every value of a type") {
  for (const Simd simd : instruction_sets()) {
    for (const Narrow& narrow : kNarrow) {
      CAPTURE(name_of(narrow.type));
      CAPTURE(static_cast<int>(simd));
      std::vector<float> values;
      std::vector<unsigned> expected;
      const auto expect = [&](double value, unsigned bits) {
        for (const bool negative : {false, true}) {
          values.push_back(static_cast<float>(negative ? -value : value));
          expected.push_back(negative ? bits | narrow.sign() : bits);
        }
      };
      for (unsigned bits = 0; bits <= narrow.largest(); ++bits) {
        const bool last = bits == narrow.largest();
        const unsigned next = last && !narrow.infinities ? bits : bits + 1;
        // In double, as the value after the largest bf16 is not an f32.
        const double middle = (narrow.value(bits) + narrow.value(bits + 1)) / 2;
        expect(narrow.value(bits), bits);
        expect(middle, bits % 2 == 0 ? bits : next);
        expect(std::nextafter(static_cast<float>(middle), 0.0F), bits);
        expect(std::nextafter(static_cast<float>(middle), kInfinity), next);
      }
      const unsigned beyond = narrow.infinities ? narrow.largest() + 1 : narrow.largest();
      expect(std::numeric_limits<float>::max(), beyond);
      expect(kInfinity, beyond);
      expect(std::numeric_limits<float>::denorm_min(), 0);

      const Bytes elements = narrowed(narrow.type, values, simd);
      std::size_t wrong = 0;
      for (std::size_t i = 0; i < values.size(); ++i) {
        wrong += bits_at(narrow.type, elements, i) == expected[i] ? 0U : 1U;
      }
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("a NaN stays a NaN of the same sign") {
  for (const Simd simd : instruction_sets()) {
    for (const unsigned payload :
         {1U, 0x1fffU, 0x2000U, 0xffffU, 0x10000U, 0x3fffffU, 0x400000U, 0x7fffffU}) {
      for (const unsigned sign : {0U, 0x80000000U}) {
        const float nan = std::bit_cast<float>(sign | 0x7f800000U | payload);
        for (const DType type : {DType::bf16, DType::f16, DType::f8_e4m3}) {
          const float back = widened(type, narrowed(type, {nan}, simd), simd).at(0);
          CHECK(std::isnan(back));
          CHECK(std::signbit(back) == (sign != 0));
        }
      }
    }
  }
}

TEST_CASE("both instruction sets convert alike, between all types and at every length") {
  Random random;
  CAPTURE(random.seed);
  for (const DType to : kTypes) {
    for (const DType from : kTypes) {
      CAPTURE(name_of(to));
      CAPTURE(name_of(from));
      for (std::size_t n = 0; n < 70; ++n) {
        // A byte more before and after: nothing is aligned, and bytes outside must not change.
        Bytes source(n * size_of(from) + 1);
        random.fill(source.data(), source.size());
        Bytes plain(n * size_of(to) + 2, std::byte{0x5a});
        Bytes best = plain;
        convert(plain.data() + 1, to, source.data() + 1, from, n, Simd::portable);
        convert(best.data() + 1, to, source.data() + 1, from, n, best_simd());
        CHECK(plain == best);
        CHECK(plain.front() == std::byte{0x5a});
        CHECK(plain.back() == std::byte{0x5a});
      }
    }
  }
}

TEST_CASE("a conversion between narrow types rounds once") {
  for (const Simd simd : instruction_sets()) {
    for (const Narrow& from : kNarrow) {
      const Bytes elements = all_of(from);
      const std::size_t n = elements.size() / size_of(from.type);
      for (const Narrow& to : kNarrow) {
        Bytes direct(n * size_of(to.type));
        convert(direct.data(), to.type, elements.data(), from.type, n, simd);
        if (to.type == from.type) {
          CHECK(direct == elements);
        } else {
          CHECK(direct == narrowed(to.type, widened(from.type, elements, simd), simd));
        }
      }
    }
  }
}

TEST_CASE("quantised blocks are as near to their elements as e4m3 allows") {
  Random random;
  CAPTURE(random.seed);
  for (const Simd simd : instruction_sets()) {
    for (const DType from : kTypes) {
      for (const std::uint32_t block : {1U, 7U, 32U, 128U}) {
        for (const std::size_t n : {std::size_t{1}, std::size_t{128}, std::size_t{300}}) {
          const Bytes source = narrowed(from, moderate(random, n), simd);
          const auto values = widened(from, source, Simd::portable);
          Bytes payload(n);
          std::vector<float> scales((n + block - 1) / block);
          quantise(payload.data(), scales.data(), block, source.data(), from, n, simd);
          const auto elements = widened(DType::f8_e4m3, payload, Simd::portable);
          bool right = true;
          for (std::size_t begin = 0; begin < n; begin += block) {
            const std::size_t end = std::min(n, begin + block);
            double largest = 0;
            for (std::size_t i = begin; i < end; ++i) {
              largest = std::max(largest, std::abs(static_cast<double>(values[i])));
            }
            const double scale = scales[begin / block];
            right &= std::abs(scale - largest / 448) <= largest / 448 * 0x1p-23;
            for (std::size_t i = begin; i < end; ++i) {
              const double exact = values[i] / scale;
              const double error = std::abs(elements[i] - exact);
              right &= error <= unit_in_last_place(DType::f8_e4m3, exact) * 0.50001;
            }
          }
          CHECK(right);
        }
      }
    }
  }
}

TEST_CASE("both instruction sets quantise all elements alike") {
  Random random;
  CAPTURE(random.seed);
  for (const DType from : kTypes) {
    for (std::size_t n = 0; n < 70; ++n) {
      Bytes source(n * size_of(from));
      random.fill(source.data(), source.size());
      Bytes plain(n), best(n);
      std::vector<float> plain_scales((n + 15) / 16), best_scales(plain_scales.size());
      quantise(plain.data(), plain_scales.data(), 16, source.data(), from, n, Simd::portable);
      quantise(best.data(), best_scales.data(), 16, source.data(), from, n, best_simd());
      CHECK(plain == best);
      CHECK(plain_scales == best_scales);
    }
  }
}

TEST_CASE("a block of zeros has the scale 1, and one of special values a finite scale") {
  for (const Simd simd : instruction_sets()) {
    const std::vector<std::vector<float>> blocks{{0, -0.0F, 0, 0},
                                                 {kNan, 448, -1, kNan},
                                                 {kInfinity, 1, -kInfinity, 0},
                                                 {1e-45F, -1e-45F, 0, 1e-40F},
                                                 {kNan, kNan, kNan, kNan}};
    std::vector<float> source, scales(blocks.size());
    for (const auto& block : blocks) source.insert(source.end(), block.begin(), block.end());
    Bytes payload(source.size());
    quantise(payload.data(), scales.data(), 4, bytes_of(source), DType::f32, source.size(), simd);
    const auto elements = widened(DType::f8_e4m3, payload, simd);

    CHECK(scales[0] == 1);
    CHECK(same_bits(elements[1], -0.0F));
    CHECK(scales[1] == 1);
    CHECK(std::isnan(elements[4]));
    CHECK(elements[5] == 448);
    CHECK(elements[6] == -1);
    CHECK(scales[2] == std::numeric_limits<float>::max() / 448);
    CHECK(elements[8] == 448);
    CHECK(elements[10] == -448);
    CHECK(std::isnormal(scales[3]));
    CHECK(std::abs(elements[15]) <= 448);
    CHECK(scales[4] == 1);
    CHECK(std::isnan(elements[19]));
  }
}

TEST_CASE("a weighted sum equals that of doubles, rounded once") {
  Random random;
  CAPTURE(random.seed);
  std::vector<std::size_t> lengths(40);
  std::iota(lengths.begin(), lengths.end(), 0);
  for (const std::size_t n : {63U, 64U, 65U, 127U, 128U, 200U, 1000U}) lengths.push_back(n);
  for (const DType to : kTypes) {
    for (const DType from : kTypes) {
      CAPTURE(name_of(to));
      CAPTURE(name_of(from));
      for (const std::size_t n : lengths) {
        const std::size_t count = random.below(17);
        std::vector<Bytes> rows;
        std::vector<std::vector<float>> values;
        std::vector<WeightedRow> weighted;
        for (std::size_t row = 0; row < count; ++row) {
          rows.push_back(narrowed(from, moderate(random, n), Simd::portable));
          values.push_back(widened(from, rows.back(), Simd::portable));
        }
        for (const Bytes& row : rows) weighted.push_back({row.data(), moderate(random, 1)[0]});

        Bytes plain(n * size_of(to) + 1, std::byte{0x5a});
        Bytes best = plain;
        weighted_sum(plain.data(), to, weighted, from, n, Simd::portable);
        weighted_sum(best.data(), to, weighted, from, n, best_simd());
        CHECK(plain == best);
        CHECK(plain.back() == std::byte{0x5a});

        plain.pop_back();
        const auto sums = widened(to, plain, Simd::portable);
        bool right = true;
        for (std::size_t i = 0; i < n; ++i) {
          double sum = 0, magnitudes = 0;
          for (std::size_t row = 0; row < count; ++row) {
            const double term = static_cast<double>(weighted[row].weight) * values[row][i];
            sum += term;
            magnitudes += std::abs(term);
          }
          if (to == DType::f8_e4m3) sum = std::clamp(sum, -448.0, 448.0);
          // One rounding in f32 for each row, and one to the type.
          const double allowed =
              unit_in_last_place(to, sum) * 0.5 + magnitudes * static_cast<double>(count) * 0x1p-23;
          right &= std::abs(sums[i] - sum) <= allowed;
        }
        CHECK(right);
      }
    }
  }
}

TEST_CASE("a weighted sum of no rows is zeros, and one of a row with the weight 1 is the row") {
  for (const Simd simd : instruction_sets()) {
    for (const DType type : kTypes) {
      Bytes zeros(77 * size_of(type), std::byte{0xff});
      weighted_sum(zeros.data(), type, {}, type, 77, simd);
      CHECK(zeros == Bytes(zeros.size()));

      Random random;
      CAPTURE(random.seed);
      const Bytes row = narrowed(type, moderate(random, 77), simd);
      Bytes sum(row.size());
      const WeightedRow one{row.data(), 1};
      weighted_sum(sum.data(), type, {&one, 1}, type, 77, simd);
      CHECK(sum == row);
    }
  }
}

TEST_CASE("rows are added in their order") {
  for (const Simd simd : instruction_sets()) {
    const std::vector<float> large(9, 1e8F), one(9, 1), less(9, -1e8F);
    const std::array rows{WeightedRow{bytes_of(large), 1}, WeightedRow{bytes_of(one), 1},
                          WeightedRow{bytes_of(less), 1}};
    const std::array others{rows[0], rows[2], rows[1]};
    std::vector<float> sum(9);
    weighted_sum(bytes_of(sum), DType::f32, rows, DType::f32, 9, simd);
    CHECK(sum == std::vector<float>(9, 0));
    weighted_sum(bytes_of(sum), DType::f32, others, DType::f32, 9, simd);
    CHECK(sum == one);
  }
}

TEST_CASE("a copy is complete and writes nothing outside") {
  Random random;
  CAPTURE(random.seed);
  for (const Stores stores : {Stores::cached, Stores::streamed}) {
    for (const std::size_t bytes : {0U, 1U, 63U, 64U, 511U, 512U, 4096U, 14336U, 100003U}) {
      Bytes source(bytes), copied(bytes + 2, std::byte{0x5a});
      random.fill(source.data(), source.size());
      moe::copy(copied.data() + 1, source.data(), bytes, stores);
      CHECK(std::equal(source.begin(), source.end(), copied.begin() + 1));
      CHECK(copied.front() == std::byte{0x5a});
      CHECK(copied.back() == std::byte{0x5a});
    }
  }
}

TEST_CASE("a row has its scales after its elements, and begins at a cache line") {
  constexpr RowFormat plain{DType::bf16, 7168};
  static_assert(plain.bytes() == 14336 && plain.scale_bytes() == 0);
  constexpr RowFormat scaled{DType::f8_e4m3, 7168, 128};
  static_assert(scaled.payload_bytes() == 7168 && scaled.scale_bytes() == 224);
  static_assert(scaled.bytes() == 7424);
  constexpr RowFormat odd{DType::f8_e4m3, 33, 32};
  static_assert(odd.scales() == 2 && odd.scales_offset() == 36 && odd.bytes() == 64);
  CHECK(plain != scaled);
}

// Runs the self-test of the kernels, and prints a number that stands for products of rows and weights in 8 and 4 bits and in all block
// formats: builds for other processors print the same one.

#include <cstdio>
#include <random>

#include "selftest.h"

namespace {

std::mt19937 next(1);
uint64_t digest = 14695981039346656037ull;

float number() { return float(int(next() % 20001) - 10000) / 3000.0f; }

template <typename T>
void products(const Weight& w) {
  for (int64_t rows : {1, 2, 3, 4, 5, 60}) {
    std::vector<T> x(rows * w.in), y(rows * w.out);
    for (T& each : x) each = as<T>(number());
    void* to = y.data();
    multiply<T>({&w}, x.data(), &to, rows);
    for (const T& each : y) digest = (digest ^ std::bit_cast<uint32_t>(value_of(each))) * 1099511628211ull;
  }
}

template <typename T>
void all() {
  constexpr int64_t in = 512, out = 80, padded = 96;
  std::vector<uint8_t> bytes(in * padded);
  std::vector<float> scale(padded);
  std::vector<int32_t> sum(padded);
  for (float& each : scale) each = number();
  for (int64_t i = 0; i < in * padded; ++i) {
    const int weight = int(next() % 255) - 127;
    bytes[i] = uint8_t(weight), sum[i / (in * block_width) * block_width + i / 4 % block_width] += weight;
  }
  products<T>({bytes.data(), nullptr, scale.data(), sum.data(), nullptr, in, out, sizeof(T) == 2, {}});
  std::vector<bf16> scales(in / group_length * padded);
  for (bf16& each : scales) each = narrow(number());
  products<T>({bytes.data(), nullptr, nullptr, nullptr, scales.data(), in, out, sizeof(T) == 2, {}});
  for (const BlockFormat& form : block_formats) {
    if (!form.scaled()) continue;
    const int64_t blocks = padded / block_width * in / form.length;
    std::vector<uint8_t> data(blocks * form.size());
    for (uint8_t& each : data) each = uint8_t(next());
    for (int64_t b = 0; b < blocks; ++b)
      for (int64_t t = 0; t < (form.low ? 2 : 1) * block_width; ++t) {
        const uint16_t half = form.type == mxfp4_type ? narrow(number()) : uint16_t(0x1c00 + next() % 0x800);
        std::memcpy(data.data() + b * form.size() + 2 * t, &half, 2);
      }
    products<T>({data.data(), nullptr, nullptr, nullptr, nullptr, in, out, sizeof(T) == 2, {}, &form, true});
  }
}

}  // namespace

int main() {
  all<float>(), all<bf16>();
  std::printf("%016llx\n", (unsigned long long)digest);
  return self_test();
}

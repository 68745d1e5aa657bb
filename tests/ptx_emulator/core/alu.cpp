// The lane-wise instructions: alu.py makes their functions from its table.
#include "machine.h"

namespace {
template <class T> void keep_lanes(T* registers, const T* values, u32 m) {
  if (m == ~0u) {
    memcpy(registers, values, 32 * sizeof(T));
    return;
  }
  for (u32 lane = 0; lane < 32; lane++) registers[lane] = m >> lane & 1 ? values[lane] : registers[lane];
}
}  // namespace

#include "alu.inc"

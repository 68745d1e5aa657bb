// Types that every part of the interpreter shares: instructions, launch settings, findings, faults.
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s32 = int32_t;
using s64 = int64_t;
using f32 = float;
using f64 = double;

constexpr u32 SHARED_BASE = 1024;           // as in lower.py
constexpr u64 LOCAL_BASE = 1u << 24;        // as in lower.py
constexpr u32 SHARED_GUARD = 1024;          // bytes behind the last shared byte, never valid
constexpr u32 TMEM_LANES = 128, TMEM_COLUMNS = 512;
constexpr s32 ABSENT = -1, ALWAYS_FALSE = -2, ALWAYS_TRUE = -3;

// Layout shared with bindings.py.
struct Instr { s32 kind, guard, negated, a, b, c, count, at; s64 imm; };
enum Role : u8 { ROLE_NONE, ROLE_USE, ROLE_DEFINE, ROLE_USE_PREDICATE, ROLE_DEFINE_PREDICATE };
enum MemorySpace : s32 { MEMORY_PARAM, MEMORY_SHARED, MEMORY_GLOBAL, MEMORY_GENERIC, MEMORY_LOCAL };  // as in handlers.py
enum Schedule : u32 { EAGER, LAZY, RANDOM };
enum Check : u32 { CHECK_INIT = 1, CHECK_RACES = 2, CHECK_GLOBAL = 4, CHECK_LANES = 8, CHECK_TCGEN05_FENCES = 16 };
struct LaunchConfig {
  u32 grid[3], block[3];
  u32 shared_bytes, local_bytes, schedule, seed, quantum, checks, resident_ctas, registers_per_thread, dynamic_bytes;
  u32 workers;
  u64 max_instructions;
};
struct LaunchStats { u64 instructions, mma, async_ops, async_bytes, ctas; };

enum AgentType : u32 { AGENT_WARP, AGENT_TENSOR, AGENT_LOAD, AGENT_STORE, AGENT_WGMMA };
enum Space : s32 { SPACE_NONE, SPACE_SHARED, SPACE_GLOBAL, SPACE_TMEM };
// An agent as reports name it: its type and the warp that it belongs to or that issued it; -1 for none.
inline s32 agent_code(u32 type, u32 warp) { return (s32)(type << 16 | warp); }

struct Finding {
  std::string kind, text;
  s32 pc, agent, other_pc, other_agent, cta, other_cta, space;
  u64 address, count;
  bool fatal;
};

// What stops a launch: everything after it would be garbage.
struct Fault : std::runtime_error {
  std::string kind;
  s32 space = SPACE_NONE;
  u64 address = 0;
  Fault(std::string k, const std::string& text) : std::runtime_error(text), kind(std::move(k)) {}
};

inline std::string printed(const char* pattern, ...) {
  char buffer[800];
  va_list arguments;
  va_start(arguments, pattern);
  vsnprintf(buffer, sizeof buffer, pattern, arguments);
  va_end(arguments);
  return buffer;
}
#define FAULT(kind, ...) throw Fault(kind, printed(__VA_ARGS__))

[[noreturn]] inline void fault_at(const char* kind, s32 space, u64 address, const std::string& text) {
  Fault fault(kind, text);
  fault.space = space;
  fault.address = address;
  throw fault;
}

// Zeros when first used; pages that nothing touches are never made.
template <class T> class LazyArray {
 public:
  // Returns whether the contents are zeros; else what an earlier use of the same size left is still there.
  bool reserve(u64 count) {
    if (count <= count_) return false;
    count_ = count;
    memory_.reset(calloc(count + 1, sizeof(T)));
    first_ = (T*)(((u64)memory_.get() + sizeof(T) - 1) / sizeof(T) * sizeof(T));
    return true;
  }
  void clear(u64 count) {
    if (!reserve(count)) memset((void*)first_, 0, count * sizeof(T));
  }
  bool empty() const { return !count_; }
  T& operator[](u64 i) const { return first_[i]; }

 private:
  struct Release { void operator()(void* memory) const { free(memory); } };
  std::unique_ptr<void, Release> memory_;
  T* first_ = nullptr;
  u64 count_ = 0;
};

class Findings {
 public:
  std::vector<Finding> all;
  void add(Finding finding) {
    auto key = std::make_tuple(finding.kind, finding.pc, finding.other_pc);
    auto [place, fresh] = index_.try_emplace(key, all.size());
    if (fresh) all.push_back(std::move(finding));
    else all[place->second].count += finding.count;
  }
  void clear() { all.clear(); index_.clear(); }

 private:
  std::map<std::tuple<std::string, s32, s32>, size_t> index_;
};

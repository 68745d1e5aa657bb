// Divergence: lanes that take different paths form groups; the group with the smallest program counter runs first, so
// that groups meet again where their paths join.
#include "machine.h"

// Makes the runnable group with the smallest pc current and merges those that are at the same place. False if no group
// can run.
bool Cta::select_group(Warp& w) {
  if (w.mask) {
    w.others.push_back({w.pc, w.mask, false, 0});
    w.mask = 0;
  }
  for (size_t i = 0; i < w.others.size(); i++)
    for (size_t k = w.others.size(); k-- > i + 1;)
      if (w.others[k].pc == w.others[i].pc) {
        w.others[i].mask |= w.others[k].mask;
        w.others[i].parked = false;
        if (!w.others[k].yielded_at) w.others[i].yielded_at = 0;
        w.others.erase(w.others.begin() + (long)k);
      }
  s32 best = -1;
  for (size_t i = 0; i < w.others.size(); i++) {
    const Group& group = w.others[i];
    if (group.parked || group.yielded_at == progress) continue;
    if (best < 0 || group.pc < w.others[(size_t)best].pc) best = (s32)i;
  }
  if (best < 0) return false;
  w.pc = w.others[(size_t)best].pc;
  w.mask = w.others[(size_t)best].mask;
  w.others.erase(w.others.begin() + best);
  return true;
}

// For instructions that a set of lanes executes together: parks the current lanes until the others of `wanted` arrive.
bool Cta::rendezvous(Warp& w, u32 m, u32 wanted, const char* what) {
  wanted &= w.live;
  if (!(wanted & ~m)) return true;
  if (w.others.empty()) FAULT("divergence", "%s by lanes %08x while %08x must take part", what, m, wanted);
  if (m != w.mask) FAULT("divergence", "%s under a guard that differs between lanes", what);
  w.others.push_back({w.pc, w.mask, true, 0});
  w.mask = 0;
  bool all_parked = true;
  for (const Group& group : w.others) all_parked = all_parked && group.parked;
  if (all_parked) {
    bool merges = false;
    for (size_t i = 0; i + 1 < w.others.size(); i++) merges = merges || w.others[i].pc == w.others.back().pc;
    if (!merges)
      FAULT("divergence", "%s by lanes %08x while %08x must take part, and the rest wait elsewhere", what, m, wanted);
  }
  return false;
}

// After a failed wait: lets other lanes of the warp go on. False if the whole warp has to yield.
bool Cta::yield_group(Warp& w) {
  if (w.others.empty()) return false;
  w.others.push_back({w.pc, w.mask, false, progress});
  w.mask = 0;
  return select_group(w);
}

void Cta::exit_lanes(Warp& w, u32 m) {
  w.live &= ~m;
  w.mask &= ~m;
  progress++;
}

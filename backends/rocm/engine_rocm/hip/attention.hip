// Decode attention over the paged cache: sequences with one token in this step, in parts of SPLIT cached tokens.
//
// Compiled with WIDTH (16 to 256, a power of two, at least the heads' width, which is a multiple of 8), HEADS (query heads of a
// workgroup, which share keys and values), BLOCK_SIZE, SPLIT, and the types ACT of q and y and KV of the cache.
#include "portable.h"

constexpr int THREADS = 128;
constexpr int COLUMNS = 8;                // of a thread
constexpr int TEAM = WIDTH / COLUMNS;     // threads that share a cached token
constexpr int TEAMS = THREADS / TEAM;
constexpr int WARPS = THREADS / WARP;
constexpr int TOKENS = 4;                 // of a team at a time, so that their loads overlap
constexpr float LOG2E = 1.4426950408889634f;
static_assert(TEAM <= WARP && WARP % TEAM == 0, "a token's threads are of one warp");

DEVICE float nothing() { return -infinity(); }

// What exponents are taken relative to: where nothing was seen, anything.
DEVICE float level_of(float most) { return most == nothing() ? 0.0f : most; }

// What some tokens sum up to for the heads of a workgroup, in this thread's columns; exponents are those of 2.
struct Sums {
  float most[HEADS], total[HEADS], mixed[HEADS][COLUMNS];
};

DEVICE float score_of(float dot, float scale, float softcap) {
  float score = dot * scale;
  if (softcap != 0) score = softcap * (1 - 2 / (exp2_of(2 * LOG2E * score / softcap) + 1));
  return score * LOG2E;
}

// Both halves of the teams that differ in ``mask``: each ends with the same sums.
DEVICE void join(Sums& sums, int mask) {
  for (int head = 0; head < HEADS; ++head) {
    const float other = shuffle_xor(sums.most[head], mask);
    const float most = most_of(sums.most[head], other), level = level_of(most);
    const float mine = exp2_of(sums.most[head] - level), theirs = exp2_of(other - level);
    sums.most[head] = most;
    sums.total[head] = sums.total[head] * mine + shuffle_xor(sums.total[head], mask) * theirs;
    for (int n = 0; n < COLUMNS; ++n)
      sums.mixed[head][n] = sums.mixed[head][n] * mine + shuffle_xor(sums.mixed[head][n], mask) * theirs;
  }
}

// TOKENS tokens of this team, from ``place`` on in steps of TEAMS; ``column``: this thread's first, which is below width.
struct Cache {
  const KV* k;
  const KV* v;
  const float* k_scale;
  const float* v_scale;
  const int* table;
  int kv_heads, kv_head, width, column, end;

  DEVICE bool seen(int place) const { return place < end; }
  DEVICE long slot(int place) const {
    const long token = (long)table[place / BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE;
    return token * kv_heads + kv_head;
  }
  DEVICE void read(const KV* from, int place, float (&to)[COLUMNS]) const {
    if (seen(place) && column < width) {
      load<COLUMNS>(from + slot(place) * width + column, to);
    } else {
      for (int n = 0; n < COLUMNS; ++n) to[n] = 0;
    }
  }
  DEVICE float factor(const float* scales, int place) const {
    return scales && seen(place) ? scales[slot(place)] : 1.0f;
  }
};

DEVICE void attend(const Cache& cache, int place, const float (&q)[HEADS][COLUMNS], float scale, float softcap, Sums& sums) {
  float scores[TOKENS][HEADS], values[TOKENS][COLUMNS];
  for (int t = 0; t < TOKENS; ++t) {
    float key[COLUMNS];
    cache.read(cache.k, place + t * TEAMS, key);
    cache.read(cache.v, place + t * TEAMS, values[t]);
    for (int head = 0; head < HEADS; ++head) {
      float dot = 0;
      for (int n = 0; n < COLUMNS; ++n) dot += q[head][n] * key[n];
      scores[t][head] = dot;
    }
  }
  for (int t = 0; t < TOKENS; ++t) {
    const float k_factor = cache.factor(cache.k_scale, place + t * TEAMS);
    for (int head = 0; head < HEADS; ++head) {
      for (int mask = 1; mask < TEAM; mask *= 2) scores[t][head] += shuffle_xor(scores[t][head], mask);
      scores[t][head] = cache.seen(place + t * TEAMS) ? score_of(scores[t][head] * k_factor, scale, softcap) : nothing();
    }
  }
  for (int head = 0; head < HEADS; ++head) {
    float most = sums.most[head];
    for (int t = 0; t < TOKENS; ++t) most = most_of(most, scores[t][head]);
    const float level = level_of(most), fading = exp2_of(sums.most[head] - level);
    sums.most[head] = most;
    sums.total[head] *= fading;
    for (int n = 0; n < COLUMNS; ++n) sums.mixed[head][n] *= fading;
    for (int t = 0; t < TOKENS; ++t) {
      const float share = exp2_of(scores[t][head] - level);
      const float weight = share * cache.factor(cache.v_scale, place + t * TEAMS);
      sums.total[head] += share;
      for (int n = 0; n < COLUMNS; ++n) sums.mixed[head][n] += weight * values[t][n];
    }
  }
}

// Grid: sequences, KV heads times chunks of HEADS of their query heads, splits. q and y [tokens, heads, width]; k and v [blocks,
// BLOCK_SIZE, kv_heads, width], their scales without the last axis, or null; sinks [heads] or null. With one split y is written,
// else the parts: part_y [sequences, heads, splits, width], part_most and part_total without the last axis, for merge_parts.
KERNEL(THREADS) attend_decode(
    const ACT* q, const KV* k, const KV* v, const float* k_scale, const float* v_scale, const float* sinks,
    const int* seq_starts, const int* offsets, const int* table, ACT* y, float* part_y, float* part_most, float* part_total,
    int table_width, int kv_heads, int group, int width, float scale, float softcap, int window, int splits) {
  SHARED(float, shared_most, WARPS * HEADS);
  SHARED(float, shared_total, WARPS * HEADS);
  SHARED(float, shared_mixed, WARPS * HEADS * WIDTH);
  const int chunks = (group + HEADS - 1) / HEADS;
  const int seq = block(0), kv_head = block(1) / chunks, chunk = block(1) % chunks, split = block(2);
  const int first = offsets[seq], context = seq_starts[seq] + 1;
  const int begin = most_of(window > 0 ? most_of(0, context - window) : 0, split * SPLIT);
  const int end = least_of(context, (split + 1) * SPLIT);
  if (offsets[seq + 1] - first != 1 || begin >= end) return;

  const int column = thread() % TEAM * COLUMNS, team = thread() / TEAM, warp = thread() / WARP;
  const long q_head = (long)kv_head * group + chunk * HEADS;
  const int heads = least_of(HEADS, group - chunk * HEADS);  // the last chunk may have fewer
  float queries[HEADS][COLUMNS];
  Sums sums;
  for (int head = 0; head < HEADS; ++head) {
    sums.most[head] = nothing();
    sums.total[head] = 0;
    for (int n = 0; n < COLUMNS; ++n) queries[head][n] = sums.mixed[head][n] = 0;
    if (head < heads && column < width)
      load<COLUMNS>(q + ((long)first * kv_heads * group + q_head + head) * width + column, queries[head]);
  }
  const Cache cache{k, v, k_scale, v_scale, table + (long)seq * table_width, kv_heads, kv_head, width, column, end};
  for (int place = begin; place < end; place += TEAMS * TOKENS) attend(cache, place + team, queries, scale, softcap, sums);
  for (int mask = TEAM; mask < WARP; mask *= 2) join(sums, mask);

  if (lane() < TEAM) {
    for (int head = 0; head < HEADS; ++head) {
      if (lane() == 0) {
        shared_most[warp * HEADS + head] = sums.most[head];
        shared_total[warp * HEADS + head] = sums.total[head];
      }
      for (int n = 0; n < COLUMNS; ++n) shared_mixed[(warp * HEADS + head) * WIDTH + column + n] = sums.mixed[head][n];
    }
  }
  barrier();
  for (int n = thread(); n < heads * WIDTH; n += THREADS) {
    const int head = n / WIDTH, place = n % WIDTH;
    if (place >= width) continue;
    float most = splits == 1 && sinks ? sinks[q_head + head] * LOG2E : nothing();
    float total = splits == 1 && sinks ? 1.0f : 0.0f, mixed = 0;
    for (int other = 0; other < WARPS; ++other) {
      const float theirs = shared_most[other * HEADS + head], higher = most_of(most, theirs), level = level_of(higher);
      const float fading = exp2_of(most - level), share = exp2_of(theirs - level);
      total = total * fading + shared_total[other * HEADS + head] * share;
      mixed = mixed * fading + shared_mixed[(other * HEADS + head) * WIDTH + place] * share;
      most = higher;
    }
    if (splits == 1) {
      put(y + ((long)first * kv_heads * group + q_head + head) * width + place, mixed / total);
    } else {
      const long part = ((long)seq * kv_heads * group + q_head + head) * splits + split;
      part_y[part * width + place] = mixed;
      if (place == 0) {
        part_most[part] = most;
        part_total[part] = total;
      }
    }
  }
}

// Grid: sequences, heads. The parts of one head, in their order.
KERNEL(THREADS) merge_parts(
    const float* part_y, const float* part_most, const float* part_total, const float* sinks, const int* seq_starts,
    const int* offsets, ACT* y, int heads, int width, int window, int splits) {
  const int seq = block(0), head = block(1), first = offsets[seq], context = seq_starts[seq] + 1;
  if (offsets[seq + 1] - first != 1) return;
  const int begin = window > 0 ? most_of(0, context - window) : 0;
  for (int place = thread(); place < width; place += THREADS) {
    float most = sinks ? sinks[head] * LOG2E : nothing(), total = sinks ? 1.0f : 0.0f, mixed = 0;
    for (int split = begin / SPLIT; split * SPLIT < context; ++split) {
      const long part = ((long)seq * heads + head) * splits + split;
      const float higher = most_of(most, part_most[part]), level = level_of(higher);
      const float fading = exp2_of(most - level), share = exp2_of(part_most[part] - level);
      total = total * fading + part_total[part] * share;
      mixed = mixed * fading + part_y[part * width + place] * share;
      most = higher;
    }
    put(y + ((long)first * heads + head) * width + place, mixed / total);
  }
}

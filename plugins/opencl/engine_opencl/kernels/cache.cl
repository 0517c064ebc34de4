// The KV cache: k and v are [blocks, block_size, kv_heads, head_dim] in f32, f16, bf16 or int8 with f32 scales a head.
#ifndef KV_INT8
#define KV_INT8 0
#endif
#if KV_INT8
#define KV char
#define KV_LOAD(p) WIDE(convert_float)(LOAD(p))
#elif KV_BF16
#define KV ushort
#define KV_LOAD(p) LOAD_BF16(p)
#elif KV_F16
#define KV half
#define KV_LOAD(p) LOAD_HALF(p)
#else
#define KV float
#define KV_LOAD(p) LOAD(p)
#endif

// ``n`` numbers of one head as they are stored: to nearest, ties to even.
inline void store_head(__local const float *row, int n, __global KV *to, __global float *scale) {
#if KV_INT8
  float most = 0;
  for (int i = 0; i < n; i++) most = isnan(row[i]) ? NAN : fmax(most, fabs(row[i])) + 0 * most;
  for (int i = 0; i < n; i++) to[i] = most > 0 && isfinite(most) ? convert_char_sat(rint(row[i] / (most / 127))) : 0;
  *scale = most / 127;
#else
  for (int i = 0; i < n; i++) {
#if KV_BF16
    const uint bits = as_uint(row[i]);
    to[i] = isnan(row[i]) ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#elif KV_F16
    vstore_half_rte(row[i], i, to);
#else
    to[i] = row[i];
#endif
  }
#endif
}

// A group takes one head of a token: of q (``heads``), which goes to y, then of k, then of v, which go to the cache. q and k
// are normed (``flags`` 1) and turned (by neighbouring pairs 2) before; v is as it is.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void turn_and_write(
    __global const float *q, __global const float *new_k, __global const float *new_v, __global float *y,
    __global const int *positions, __global const int *slots, __global const float *inv_freq,
    __global const float *q_norm, __global const float *k_norm, __global KV *k, __global KV *v, __global float *k_scale,
    __global float *v_scale, __local float *row, int heads, int kv_heads, int n, int rotary, int flags, float rope_scale,
    float eps, float offset) {
  const int head = get_group_id(0), token = get_group_id(1), own = head - heads, is_v = own >= kv_heads;
  const size_t at = own < 0 ? (size_t)token * heads + head : (size_t)token * kv_heads + own % kv_heads;
  __global const float *from = (own < 0 ? q : is_v ? new_v : new_k) + at * n, *weight = own < 0 ? q_norm : k_norm;
  if (own >= 0 && slots[token] < 0) return;
  WIDE(float) squares = 0;
  for (int i = 0; i < n; i += LANES) {
    STORE(LOAD(from + i), row + i);
    squares = fma(LOAD(from + i), LOAD(from + i), squares);
  }
  const float root = sqrt(SUM(squares) / n + eps);
  for (int i = 0; flags & 1 && !is_v && i < n; i += LANES)
    STORE(LOAD(row + i) / root * (LOAD(weight + i) + offset), row + i);
  for (int i = 0; !is_v && i < rotary / 2; i += LANES) {  // neighbouring pairs come with LANES 1
    const WIDE(float) angle = (float)positions[token] * LOAD(inv_freq + i);
    const WIDE(float) c = cos(angle) * rope_scale, s = sin(angle) * rope_scale;
    __local float *one = row + (flags & 2 ? 2 * i : i), *two = flags & 2 ? one + 1 : one + rotary / 2;
    const WIDE(float) a = LOAD(one), b = LOAD(two);
    STORE(a * c - b * s, one);
    STORE(b * c + a * s, two);
  }
  const size_t to = own < 0 ? 0 : (size_t)slots[token] * kv_heads + own % kv_heads;
  if (own >= 0) store_head(row, n, (is_v ? v : k) + to * n, (is_v ? v_scale : k_scale) + to);
  for (int i = 0; own < 0 && i < n; i += LANES) STORE(LOAD(row + i), y + at * n + i);
}

// A group takes one head of a token, and the cache in chunks of CHUNK from its first visible position on: what else is in
// the step makes no difference. ``flags``: 1, sinks; 2, values are the first ``dv`` columns of keys.
#define CHUNK 64
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void attention(
    __global const float *q, __global const int *starts, __global const int *offsets, __global const int *table,
    __global const float *sinks, __global const KV *k, __global const KV *v, __global const float *k_scale,
    __global const float *v_scale, __global float *y, __local float *query, __local float *sum, __local float *score,
    __local int *slot, int S, int P, int heads, int kv_heads, int d, int block_size, int window, int dv, int flags,
    float scale, float softcap) {
  const int head = get_group_id(0), token = get_group_id(1), own = get_local_id(0), kv_head = head * kv_heads / heads;
  __global const KV *values = flags & 2 ? k : v;
  __global const float *value_scale = flags & 2 ? k_scale : v_scale;
  const int stride = flags & 2 ? d : dv;
  int seq = 0;
  for (int high = S; high - seq > 1;) {  // the last sequence that begins at the token or before
    const int middle = (seq + high) / 2;
    *(offsets[middle] <= token ? &seq : &high) = middle;
  }
  const int end = starts[seq] + token - offsets[seq] + 1, begin = window > 0 ? max(0, end - window) : 0;
  const size_t at = (size_t)token * heads + head;
  EACH(i, d) STORE(LOAD(q + at * d + i) * scale, query + i);
  EACH(i, dv) STORE(BROADCAST(0), sum + i);
  float most = flags & 1 ? sinks[head] : -INFINITY, total = flags & 1;
  for (int first = begin; first < end; first += CHUNK) {
    const int count = min(CHUNK, end - first);
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = own; i < CHUNK; i += WG) {
      score[i] = -INFINITY;
      if (i >= count) continue;
      const int position = first + i, block = table[(size_t)seq * P + position / block_size];
      slot[i] = (block * block_size + position % block_size) * kv_heads + kv_head;
      WIDE(float) dot = 0;
      for (int j = 0; j < d; j += LANES) dot = fma(LOAD(query + j), KV_LOAD(k + (size_t)slot[i] * d + j), dot);
      const float s = SUM(dot) * (KV_INT8 ? k_scale[slot[i]] : 1);
      score[i] = softcap > 0 ? softcap * tanh(s / softcap) : s;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    WIDE(float) highest = -INFINITY, added = 0;
    for (int i = 0; i < CHUNK; i += LANES) highest = fmax(highest, LOAD(score + i));
    const float now = fmax(most, MAX(highest)), kept = exp(most - now);
    barrier(CLK_LOCAL_MEM_FENCE);
    EACH(i, CHUNK) STORE(exp(LOAD(score + i) - now), score + i);
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = 0; i < CHUNK; i += LANES) added += LOAD(score + i);
    total = fma(total, kept, SUM(added));
    most = now;
    EACH(j, dv) {
      WIDE(float) mixed = LOAD(sum + j) * kept;
      for (int i = 0; i < count; i++) {
        const float share = score[i] * (KV_INT8 ? value_scale[slot[i]] : 1);
        mixed = fma(KV_LOAD(values + (size_t)slot[i] * stride + j), BROADCAST(share), mixed);
      }
      STORE(mixed, sum + j);
    }
  }
  EACH(i, dv) STORE(LOAD(sum + i) / total, y + at * dv + i);
}

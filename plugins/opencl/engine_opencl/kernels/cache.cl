// The KV cache: k and v are [blocks, block_size, kv_heads, head_dim] of KV: float, half, ushort (bf16), or char with a float
// scale a head. Numbers are stored to nearest, ties to even.
#define store_float(x, i, to) to[i] = x
#define store_half(x, i, to) vstore_half_rte(x, i, to)
#define store_ushort(x, i, to) to[i] = isnan(x) ? as_uint(x) >> 16 | 0x40 : (as_uint(x) + 0x7fff + (as_uint(x) >> 16 & 1)) >> 16
#define store_char(x, i, to) to[i] = convert_char_sat(rint(x))
#define SCALED (sizeof(KV) == 1)
// A group takes one head of a token: of q (``heads``), which goes to y, then of k, then of v, which go to the cache. q and k
// are normed (``flags`` 1) and turned (by neighbouring pairs 2) before; v is as it is.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void turn_and_write(
    IN float *q, IN float *new_k, IN float *new_v, OUT float *y, IN int *positions, IN int *slots, IN float *inv_freq,
    IN float *q_norm, IN float *k_norm, OUT KV *k, OUT KV *v, OUT float *k_scale, OUT float *v_scale, LOCAL float *row,
    int heads, int kv_heads, int n, int rotary, int flags, float rope_scale, float eps, float offset) {
  const int head = get_group_id(0), token = get_group_id(1), own = head - heads, is_v = own >= kv_heads;
  const size_t at = own < 0 ? (size_t)token * heads + head : (size_t)token * kv_heads + own % kv_heads;
  IN float *from = (own < 0 ? q : is_v ? new_v : new_k) + at * n, *weight = own < 0 ? q_norm : k_norm;
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
    LOCAL float *one = row + (flags & 2 ? 2 * i : i), *two = flags & 2 ? one + 1 : one + rotary / 2;
    const WIDE(float) a = LOAD(one), b = LOAD(two);
    STORE(a * c - b * s, one);
    STORE(b * c + a * s, two);
  }
  for (int i = 0; own < 0 && i < n; i += LANES) STORE(LOAD(row + i), y + at * n + i);
  if (own < 0) return;
  const size_t slot = (size_t)slots[token] * kv_heads + own % kv_heads;
  OUT KV *to = (is_v ? v : k) + slot * n;
  float most = 0;
  for (int i = 0; SCALED && i < n; i++) most = isnan(row[i]) ? NAN : fmax(most, fabs(row[i])) + 0 * most;
  const int usable = most > 0 && isfinite(most);
  for (int i = 0; i < n; i++) {
    const float x = !SCALED ? row[i] : usable ? row[i] / (most / 127) : 0;
    JOIN(store_, KV)(x, i, to);
  }
  if (SCALED) (is_v ? v_scale : k_scale)[slot] = most / 127;
}
// A group takes one head of a token, and the cache in chunks of CHUNK from its first visible position on: what else is in
// the step makes no difference. ``flags``: 1, sinks; 2, values are the first ``dv`` columns of keys; 4, queries see
// what comes after them, too.
#define CHUNK 64
KERNEL attention(
    IN float *q, IN int *starts, IN int *offsets, IN int *table, IN float *sinks, IN KV *k, IN KV *v, IN float *k_scale,
    IN float *v_scale, OUT float *y, LOCAL float *query, LOCAL float *sum, LOCAL float *score, LOCAL int *slot, int S, int P,
    int heads, int kv_heads, int d, int block_size, int window, int dv, int flags, float scale, float softcap) {
  const int head = get_group_id(0), token = get_group_id(1), own = get_local_id(0), kv_head = head * kv_heads / heads;
  IN KV *values = flags & 2 ? k : v;
  IN float *value_scale = flags & 2 ? k_scale : v_scale;
  const int stride = flags & 2 ? d : dv;
  int seq = 0;
  for (int high = S; high - seq > 1;) {  // the last sequence that begins at the token or before
    const int middle = (seq + high) / 2;
    *(offsets[middle] <= token ? &seq : &high) = middle;
  }
  const int next = starts[seq] + token - offsets[seq] + 1, begin = window > 0 ? max(0, next - window) : 0;
  const int context = starts[seq] + offsets[seq + 1] - offsets[seq];
  const int end = !(flags & 4) ? next : window > 0 ? min(context, next - 1 + window) : context;
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
      for (int j = 0; j < d; j += LANES) dot = fma(LOAD(query + j), FLOATS(KV, k + (size_t)slot[i] * d + j), dot);
      const float s = SUM(dot) * (SCALED ? k_scale[slot[i]] : 1);
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
        const float share = score[i] * (SCALED ? value_scale[slot[i]] : 1);
        mixed = fma(FLOATS(KV, values + (size_t)slot[i] * stride + j), BROADCAST(share), mixed);
      }
      STORE(mixed, sum + j);
    }
  }
  EACH(i, dv) STORE(LOAD(sum + i) / total, y + at * dv + i);
}

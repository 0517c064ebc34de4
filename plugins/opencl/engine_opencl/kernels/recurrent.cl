// Layers that remember a block a sequence. A token goes on from the block of the one before it and writes to its own: the last of
// a block writes last. So each work-item goes along its sequence by itself, with LANES columns that no other touches.
#define BLOCK(position) ((size_t)table[(size_t)seq * P + (position) / block_size])
// ``y[t] = bias + sum of weight[w] * x[t - TAPS + 1 + w]``, or its silu, a filter of TAPS a column.
__kernel void causal_conv(IN float *x, IN int *starts, IN int *offsets, IN int *table, IN float *weight, IN float *bias,
                          OUT float *tail, OUT float *y, int P, int columns, int silu, int biased, int block_size) {
  const int c = get_global_id(0) * LANES, seq = get_global_id(1), start = starts[seq], first = offsets[seq];
  if (c >= columns) return;
  WIDE(float) past[TAPS], taps[TAPS];
  float own[LANES];
  for (int w = 0; w < TAPS; w++) {
    for (int l = 0; l < LANES; l++) own[l] = weight[(size_t)(c + l) * TAPS + w];
    taps[w] = LOAD(own);
  }
  for (int w = 1; w < TAPS; w++)
    past[w] = start ? LOAD(tail + (BLOCK(start - 1) * (TAPS - 1) + w - 1) * columns + c) : BROADCAST(0);
  for (int t = first; t < offsets[seq + 1]; t++) {
    WIDE(float) sum = 0;
    for (int w = 1; w < TAPS; w++) past[w - 1] = past[w];
    past[TAPS - 1] = LOAD(x + (size_t)t * columns + c);
    for (int w = 0; w < TAPS; w++) sum = fma(past[w], taps[w], sum);
    if (biased) sum += LOAD(bias + c);
    STORE(silu ? sum / (1 + exp(-sum)) : sum, y + (size_t)t * columns + c);
    const int position = start + t - first;
    if (t + 1 < offsets[seq + 1] && (position + 1) % block_size) continue;
    for (int w = 1; w < TAPS; w++) STORE(past[w], tail + (BLOCK(position) * (TAPS - 1) + w - 1) * columns + c);
  }
}
// Where a head's memory S [dk, dv] lies after a token, and what is kept of row i of what it was before one.
#define SLOT(position) (memory + (BLOCK(position) * heads + head) * dk * dv)
#define KEPT(i) (position ? LOAD(before + (i) * dv + j) * kept : BROADCAST(0))
inline float softplus(float x) { return fmax(x, 0) + log1p(exp(-fabs(x))); }
// A group takes one head of a sequence.
KERNEL gated_delta(IN float *qkv, IN float *decay, IN float *beta, IN int *starts, IN int *offsets, IN int *table,
                   IN float *rate, IN float *bias, OUT float *memory, OUT float *y, int P, int key_heads, int heads, int dk,
                   int dv, int block_size) {
  const int head = get_group_id(0), seq = get_group_id(1), start = starts[seq], first = offsets[seq];
  const size_t keys = (size_t)key_heads * dk, row = 2 * keys + (size_t)heads * dv;
  for (int t = first; t < offsets[seq + 1]; t++) {
    const int position = start + t - first;
    IN float *q = qkv + t * row + head * key_heads / heads * dk, *k = q + keys, *v = qkv + t * row + 2 * keys + head * dv;
    float q_length = 0, k_length = 0;
    for (int i = 0; i < dk; i++) {
      q_length = fma(q[i], q[i], q_length);
      k_length = fma(k[i], k[i], k_length);
    }
    const float of_q = 1 / sqrt((q_length + 1e-6f) * dk), of_k = 1 / sqrt(k_length + 1e-6f);
    const float kept = exp(rate[head] * softplus(decay[(size_t)t * heads + head] + bias[head]));
    const float written = 1 / (1 + exp(-beta[(size_t)t * heads + head]));
    IN float *before = SLOT(max(position - 1, 0));
    OUT float *after = SLOT(position);
    EACH(j, dv) {
      WIDE(float) found = 0, read = 0;
      for (int i = 0; i < dk; i++) found = fma(KEPT(i), BROADCAST(k[i] * of_k), found);
      const WIDE(float) change = (LOAD(v + j) - found) * written;
      for (int i = 0; i < dk; i++) {
        const WIDE(float) now = fma(change, BROADCAST(k[i] * of_k), KEPT(i));
        STORE(now, after + i * dv + j);
        read = fma(now, BROADCAST(q[i] * of_q), read);
      }
      STORE(read, y + ((size_t)t * heads + head) * dv + j);
    }
  }
}
// A group takes one head of a sequence: ``S = exp(rate * d) * S + B (d * x); y = C S + skip * x``.
KERNEL ssm_scan(IN float *xbc, IN float *dt, IN int *starts, IN int *offsets, IN int *table, IN float *rate, IN float *bias,
                IN float *skip, OUT float *memory, OUT float *y, int P, int heads, int groups, int dk, int dv,
                int block_size) {
  const int head = get_group_id(0), seq = get_group_id(1), start = starts[seq], first = offsets[seq];
  const size_t columns = (size_t)heads * dv, row = columns + 2 * (size_t)groups * dk;
  for (int t = first; t < offsets[seq + 1]; t++) {
    const int position = start + t - first;
    IN float *x = xbc + t * row + head * dv, *b = xbc + t * row + columns + head * groups / heads * dk, *c = b + groups * dk;
    const float d = softplus(dt[(size_t)t * heads + head] + bias[head]), kept = exp(rate[head] * d);
    IN float *before = SLOT(max(position - 1, 0));
    OUT float *after = SLOT(position);
    EACH(j, dv) {
      const WIDE(float) own = LOAD(x + j), written = own * d;
      WIDE(float) read = own * skip[head];
      for (int i = 0; i < dk; i++) {
        const WIDE(float) now = fma(written, BROADCAST(b[i]), KEPT(i));
        STORE(now, after + i * dv + j);
        read = fma(now, BROADCAST(c[i]), read);
      }
      STORE(read, y + t * columns + head * dv + j);
    }
  }
}

// Ops on rows of f32, whose widths are whole LANES: norms by a group a slice, the others by a work-item LANES numbers.
inline float group_sum(float v, LOCAL float *shared) {
  barrier(CLK_LOCAL_MEM_FENCE);
  shared[get_local_id(0)] = v;
  barrier(CLK_LOCAL_MEM_FENCE);
  for (int i = v = 0; i < WG; i++) v += shared[i];
  return v;
}

// ``flags``: 1, residual is added first and the sum kept; 2, layer norm; 4, it has a bias; 8, the weight is as wide as a row.
KERNEL norm(IN float *x, IN float *residual, IN float *weight, IN float *bias, OUT float *total, OUT float *y, int n,
            int slices, int flags, float eps, float offset) {
  LOCAL float shared[WG];
  const size_t slice = get_group_id(0), from = slice * n, own = flags & 8 ? slice % slices * n : 0;
  if (flags & 1) {
    EACH(i, n) STORE(LOAD(x + from + i) + LOAD(residual + from + i), total + from + i);
    x = total;
  }
  float mean = 0, rest = 0;  // in two parts, since rows far from zero need more than a float
  for (int pass = 0; pass < (flags & 2); pass++) {
    WIDE(float) sum = 0;
    EACH(i, n) sum += LOAD(x + from + i) - mean;
    *(pass ? &rest : &mean) = group_sum(SUM(sum), shared) / n;
  }
  WIDE(float) squares = 0;
  EACH(i, n) {
    const WIDE(float) v = LOAD(x + from + i) - mean - rest;
    squares = fma(v, v, squares);
  }
  const float root = sqrt(group_sum(SUM(squares), shared) / n + eps);
  EACH(i, n) {
    const WIDE(float) v = (LOAD(x + from + i) - mean - rest) / root * (LOAD(weight + own + i) + offset);
    STORE(flags & 4 ? v + LOAD(bias + own + i) : v, y + from + i);
  }
}

#define OWN const size_t at = get_global_id(0), i = at * LANES; if (at >= count) return;
__kernel void gated_act(OUT float *y, int count, IN float *gate, IN float *up, int kind, int gated, float alpha,
                        float limit) {
  OWN WIDE(float) g = LOAD(gate + i), u = gated ? LOAD(up + i) : BROADCAST(1);
  if (kind == 4) {  // clamped_swiglu; a NaN stays
    g = select(g, BROADCAST(limit), g > limit);
    u = select(select(u, BROADCAST(limit), u > limit), BROADCAST(-limit), u < -limit) + 1;
  }
  if (kind == 0 || kind == 4) g = g / (1 + exp(kind ? -alpha * g : -g));
  if (kind == 1) g = 0.5f * g * (1 + erf(g * M_SQRT1_2_F));
  if (kind == 2) g = 0.5f * g * (1 + tanh(0.7978845608028654f * (g + 0.044715f * g * g * g)));
  if (kind == 3) g = select(g, BROADCAST(0), g < 0);
  if (kind == 5) g = 1 / (1 + exp(-g));
  STORE(g * u, y + i);
}
__kernel void add(OUT float *y, int count, IN float *a, IN float *b) {
  OWN STORE(LOAD(a + i) + LOAD(b + i), y + i);
}
__kernel void gather_rows(OUT float *y, int count, IN float *x, IN int *rows, int width) {
  OWN STORE(LOAD(x + (size_t)rows[i / width] * width + i % width), y + i);
}
// Whole blocks of bytes, in the order given: a copy may read what one before it wrote.
__kernel void kv_copy(OUT uchar *state, IN int *copies, int count, int block) {
  const size_t i = get_global_id(0);
  for (int c = 0; c < count && i < block; c++)
    state[(size_t)copies[2 * c + 1] * block + i] = state[(size_t)copies[2 * c] * block + i];
}

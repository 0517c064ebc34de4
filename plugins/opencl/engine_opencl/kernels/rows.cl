// Ops on rows of f32: norms by a group a slice, the others by a work-item a number.

// ``flags``: 1, residual is added first and the sum kept; 2, layer norm; 4, it has a bias; 8, the weight is as wide as a row.
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void norm(
    __global const float *x, __global const float *residual, __global const float *weight, __global const float *bias,
    __global float *total, __global float *y, int n, int slices, int flags, float eps, float offset) {
  __local float shared[WG];
  const size_t slice = get_group_id(0), from = slice * n, own = flags & 8 ? slice % slices * n : 0;
  if (flags & 1) {
    EACH(i, n) STORE(LOAD(x + from + i) + LOAD(residual + from + i), total + from + i);
    REST(i, n) total[from + i] = x[from + i] + residual[from + i];
    x = total;
  }
  float mean = 0, rest = 0;  // in two parts, since rows far from zero need more than a float
  for (int pass = 0; pass < (flags & 2); pass++) {
    WIDE(float) sum = 0;
    EACH(i, n) sum += LOAD(x + from + i) - mean;
    float one = SUM(sum);
    REST(i, n) one += x[from + i] - mean;
    one = group_sum(one, shared) / n;
    if (pass) rest = one; else mean = one;
  }
  const float root = root_mean_square(x + from, n, mean, rest, eps, shared);
  EACH(i, n) {
    WIDE(float) v = (LOAD(x + from + i) - mean - rest) / root * (LOAD(weight + own + i) + offset);
    if (flags & 4) v += LOAD(bias + own + i);
    STORE(v, y + from + i);
  }
  REST(i, n) {
    const float v = (x[from + i] - mean - rest) / root * (weight[own + i] + offset);
    y[from + i] = flags & 4 ? v + bias[own + i] : v;
  }
}

// A work-item takes LANES numbers.
__kernel void gated_act(__global const float *gate, __global const float *up, __global float *y, int n, int kind,
                        int gated, float alpha, float limit) {
  const int i = get_global_id(0) * LANES;
  if (i + LANES <= n) {
    STORE(activate(LOAD(gate + i), gated ? LOAD(up + i) : BROADCAST(1), kind, alpha, limit), y + i);
    return;
  }
  float g[LANES], u[LANES];
  for (int j = 0; j < LANES; j++) {
    g[j] = i + j < n ? gate[i + j] : 0;
    u[j] = gated && i + j < n ? up[i + j] : 1;
  }
  STORE(activate(LOAD(g), LOAD(u), kind, alpha, limit), g);
  for (int j = 0; j < LANES && i + j < n; j++) y[i + j] = g[j];
}

__kernel void add(__global const float *a, __global const float *b, __global float *y, int n) {
  const int i = get_global_id(0);
  if (i < n) y[i] = a[i] + b[i];
}

__kernel void scale_softcap(__global const float *x, __global float *y, int n, float scale, float softcap) {
  const int i = get_global_id(0);
  if (i < n) y[i] = softcap > 0 ? softcap * tanh(x[i] * scale / softcap) : x[i] * scale;
}

__kernel void gather_rows(__global const float *x, __global const int *rows, __global float *y, int n, int width) {
  const int i = get_global_id(0);
  if (i < n) y[i] = x[(size_t)rows[i / width] * width + i % width];
}

__kernel void gather_columns(__global const float *x, __global const float *columns, __global float *y, int n, int width) {
  const int i = get_global_id(0);
  if (i < n) y[i] = x[i / width * width + (int)columns[i % width]];
}

// Whole blocks of bytes, in the order given: a copy may read what one before it wrote.
__kernel void kv_copy(__global uchar *state, __global const int *copies, int count, int block) {
  const int i = get_global_id(0);
  if (i < block)
    for (int c = 0; c < count; c++) state[(size_t)copies[2 * c + 1] * block + i] = state[(size_t)copies[2 * c] * block + i];
}

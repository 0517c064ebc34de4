// Ops on rows of f32: norms by a group a slice, the others by a work-item a number.

// A slice's own part of this work-item: vectors, then what is left of them.
#define EACH(i, n) for (int i = get_local_id(0) * LANES; i + LANES <= (n); i += WG * LANES)
#define REST(i, n) for (int i = (n) / LANES * LANES + get_local_id(0); i < (n); i += WG)

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
  WIDE(float) squares = 0;
  EACH(i, n) {
    const WIDE(float) v = LOAD(x + from + i) - mean - rest;
    squares = fma(v, v, squares);
  }
  float one = SUM(squares);
  REST(i, n) {
    const float v = x[from + i] - mean - rest;
    one = fma(v, v, one);
  }
  const float root = sqrt(group_sum(one, shared) / n + eps);
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

// ``kind``: silu, gelu, gelu_tanh, relu, clamped_swiglu.
__kernel void gated_act(__global const float *gate, __global const float *up, __global float *y, int n, int kind,
                        int gated, float alpha, float limit) {
  const int i = get_global_id(0);
  if (i >= n) return;
  float g = gate[i], u = gated ? up[i] : 1, v;
  if (kind == 4) {
    g = g > limit ? limit : g;
    u = (u > limit ? limit : u < -limit ? -limit : u) + 1;
    v = g / (1 + exp(-alpha * g));
  } else if (kind == 0) {
    v = g / (1 + exp(-g));
  } else if (kind == 1) {
    v = 0.5f * g * (1 + erf(g * M_SQRT1_2_F));
  } else if (kind == 2) {
    v = 0.5f * g * (1 + tanh(0.7978845608028654f * (g + 0.044715f * g * g * g)));
  } else {
    v = g < 0 ? 0 : g;
  }
  y[i] = v * u;
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

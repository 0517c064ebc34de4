// A head of q, k or v of one token a threadgroup, which is one simdgroup: its norm, its rotation, and of k and v the cache's
// type. Heads of q come first, then those of k, then those of v.
constexpr int LANES = 32;
const int lane = thread_index_in_simdgroup;
const int token = threadgroup_position_in_grid.z, row = threadgroup_position_in_grid.y;
const bool is_q = row < HEADS, is_v = row >= HEADS + KV_HEADS;
const int head = is_q ? row : is_v ? row - HEADS - KV_HEADS : row - HEADS;
const size_t from = (size_t(token) * (is_q ? HEADS : KV_HEADS) + head) * D;
const float eps = params[0], weight_offset = params[1], scale = params[2];

float x[(D + LANES - 1) / LANES], squares = 0;
for (int n = 0, d = lane; d < D; ++n, d += LANES) {
    x[n] = is_q ? q[from + d] : is_v ? new_v[from + d] : new_k[from + d];
    squares += x[n] * x[n];
}

threadgroup float whole[D];
if (!is_v) {
    const float factor = NORMED ? 1 / precise::sqrt(simd_sum(squares) / D + eps) : 1;
    for (int n = 0, d = lane; d < D; ++n, d += LANES) {
        whole[d] = NORMED ? x[n] * factor * ((is_q ? q_norm[d] : k_norm[d]) + weight_offset) : x[n];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int n = 0, d = lane; d < D; ++n, d += LANES) {
        x[n] = whole[d];
        if (d < ROTARY) {
            const int pair = INTERLEAVED ? d / 2 : d % (ROTARY / 2);
            const bool second = INTERLEAVED ? d % 2 : d >= ROTARY / 2;
            const int distance = INTERLEAVED ? 1 : ROTARY / 2;
            const float angle = float(positions[token]) * inv_freq[pair];
            const float c = precise::cos(angle) * scale, s = precise::sin(angle) * scale;
            x[n] = second ? whole[d] * c + whole[d - distance] * s : whole[d] * c - whole[d + distance] * s;
        }
    }
}

if (is_q) {
    for (int n = 0, d = lane; d < D; ++n, d += LANES) {
        y[from + d] = x[n];
    }
    return;
}
float step = 1;
if (INT8) {
    float most = 0, lost = 0;
    for (int n = 0, d = lane; d < D; ++n, d += LANES) {
        most = max(most, fabs(x[n]));
        lost = isnan(x[n]) ? 1 : lost;
    }
    // The greatest of numbers and NaN may be either.
    step = simd_max(lost) > 0 ? NAN : simd_max(most) / 127;
    if (lane == 0) {
        (is_v ? v_scale : k_scale)[size_t(token) * KV_HEADS + head] = step;
    }
}
const bool usable = isfinite(step) && step > 0;
for (int n = 0, d = lane; d < D; ++n, d += LANES) {
    (is_v ? v : k)[from + d] = INT8 ? T(usable ? clamp(rint(x[n] / step), -127.0f, 127.0f) : 0.0f) : T(x[n]);
}

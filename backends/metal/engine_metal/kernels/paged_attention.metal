// One query of a sequence and head a threadgroup: each of its simdgroups takes every GROUPS-th key, with a softmax of its own
// that runs along, and at the end these are joined. A lane holds every 32nd number of the query and of the result.
constexpr int LANES = 32;
const int head = threadgroup_position_in_grid.y, seq = threadgroup_position_in_grid.z;
const int lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
const int kv_head = head / (HEADS / KV_HEADS), pages = page_table_shape[1];
const float scale = params[0], softcap = params[1];

float query[(D + LANES - 1) / LANES], mixed[(DV + LANES - 1) / LANES];
for (int n = 0, d = lane; d < D; ++n, d += LANES) {
    query[n] = q[(size_t(seq) * HEADS + head) * D + d] * scale;
}
for (int n = 0; n * LANES < DV; ++n) {
    mixed[n] = 0;
}

float most = -INFINITY, total = 0;
const int last = seq_starts[seq], first = WINDOW > 0 ? max(0, last + 1 - WINDOW) : 0;
for (int key = first + group; key <= last; key += GROUPS) {
    const size_t block = page_table[seq * pages + key / BLOCK];
    const size_t entry = (block * BLOCK + key % BLOCK) * KV_HEADS + kv_head;
    float score = 0;
    for (int n = 0, d = lane; d < D; ++n, d += LANES) {
        score += query[n] * float(k[entry * D + d]);
    }
    score = simd_sum(score);
    if (INT8) {
        score *= k_scale[entry];
    }
    if (softcap > 0) {
        score = softcap * precise::tanh(score / softcap);
    }
    const float higher = max(most, score);
    const float shrink = precise::exp(most - higher);
    const float share = precise::exp(score - higher);
    const float factor = INT8 ? share * (LATENT ? k_scale[entry] : v_scale[entry]) : share;
    for (int n = 0, d = lane; d < DV; ++n, d += LANES) {
        const float value = LATENT ? float(k[entry * D + d]) : float(v[entry * DV + d]);
        mixed[n] = mixed[n] * shrink + factor * value;
    }
    total = total * shrink + share;
    most = higher;
}

threadgroup float all_most[GROUPS], all_total[GROUPS], all_mixed[GROUPS * DV];
for (int n = 0, d = lane; d < DV; ++n, d += LANES) {
    all_mixed[group * DV + d] = mixed[n];
}
if (lane == 0) {
    all_most[group] = most;
    all_total[group] = total;
}
threadgroup_barrier(mem_flags::mem_threadgroup);

float highest = SINKS ? sinks[head] : -INFINITY;
for (int g = 0; g < GROUPS; ++g) {
    highest = max(highest, all_most[g]);
}
float sum = SINKS ? precise::exp(sinks[head] - highest) : 0;
for (int g = 0; g < GROUPS; ++g) {
    sum += precise::exp(all_most[g] - highest) * all_total[g];
}
for (int d = group * LANES + lane; d < DV; d += GROUPS * LANES) {
    float y_d = 0;
    for (int g = 0; g < GROUPS; ++g) {
        y_d += precise::exp(all_most[g] - highest) * all_mixed[g * DV + d];
    }
    y[(size_t(seq) * HEADS + head) * DV + d] = y_d / sum;
}

// One output of one row a simdgroup: a row of x times a row of 16-bit weights, summed in f32. A lane takes four neighbours of
// each 128 numbers.
constexpr int LANES = 32, WIDTH = 4;
const int column = threadgroup_position_in_grid.y, row = threadgroup_position_in_grid.z;
const int lane = thread_index_in_simdgroup;
const size_t from = size_t(row) * K, weights = size_t(column) * K;

float sum = 0;
for (int k = lane * WIDTH; k < K; k += LANES * WIDTH) {
    for (int n = k; n < min(k + WIDTH, K); ++n) {
        sum += x[from + n] * float(weight[weights + n]);
    }
}
sum = simd_sum(sum);
if (lane == 0) {
    y[size_t(row) * N + column] = sum;
}

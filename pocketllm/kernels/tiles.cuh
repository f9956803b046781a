// Tiles of a ragged batch, for grids whose size needs no look at the lengths of the sequences.
#pragma once

// A sequence's rows in the batch, `per_token` of them a token, and a tile of them.
struct Tile {
  int sequence;
  int start, stop;  // the sequence's tokens in the batch
  int first;        // row of the sequence
  int rows;         // none where this is not positive
};

// Tiles have up to kRows rows of one sequence. They are numbered so that sequence s, which starts at row r of the batch,
// has its first tile at r / kRows + s: there are as many numbers as that gives behind the last sequence, and a few of
// them are left without rows.
template <int kRows>
__device__ __forceinline__ Tile find_tile(int number, const int* query_start, int sequences, int per_token = 1) {
  int low = 0, high = sequences;  // around the first sequence whose tiles come later
  while (low < high) {
    const int middle = (low + high) / 2;
    if (query_start[middle] * per_token / kRows + middle <= number) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  Tile tile;
  tile.sequence = low - 1;
  tile.start = query_start[tile.sequence];
  tile.stop = query_start[low];
  tile.first = (number - tile.start * per_token / kRows - tile.sequence) * kRows;
  tile.rows = min(kRows, (tile.stop - tile.start) * per_token - tile.first);
  return tile;
}

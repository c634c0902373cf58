//! Byte-pair encoding of one piece.
//!
//! Rule: of all neighbouring pairs that have a merge, join the one with the lowest rank, leftmost first, until none is
//! left. A piece that is a token as a whole is that token (the model's tokenizer is configured so).
//!
//! Two ways to the same ids. Short pieces: scan an array of ranks for the lowest, which is quadratic but touches two
//! cache lines. Long pieces (a megabyte without a space is a valid request): a heap of candidate pairs over a linked
//! list, n log n. The tests hold one against the other.

use crate::vocabulary::Vocabulary;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Pieces up to this many bytes are merged by scanning.
const SCAN_LIMIT_BYTES: usize = 48;

/// Working memory, kept between pieces.
#[derive(Default)]
pub(crate) struct Scratch {
    symbols: Vec<Symbol>,
    nodes: Vec<Node>,
    heap: BinaryHeap<Reverse<(u32, u32)>>,
}

/// A symbol of a short piece, with the merge to its right neighbour.
#[derive(Clone, Copy)]
struct Symbol {
    id: u32,
    /// Rank of the merge with the next symbol, or [`NO_MERGE`].
    rank: u32,
    /// Its result.
    result: u32,
}

/// A symbol of a long piece.
#[derive(Clone, Copy)]
struct Node {
    id: u32,
    previous: u32,
    next: u32,
    /// Rank of the merge with the next symbol: a heap entry with another rank is out of date.
    rank: u32,
    result: u32,
}

const NO_MERGE: u32 = u32::MAX;
const NONE: u32 = u32::MAX;

/// Appends the ids of one piece of ordinary text to `out`.
pub(crate) fn encode_piece(vocabulary: &Vocabulary, piece: &[u8], scratch: &mut Scratch, out: &mut Vec<u32>) {
    if let &[byte] = piece {
        out.push(vocabulary.byte_ids[usize::from(byte)]);
    } else if let Some(id) = vocabulary.find(piece) {
        out.push(id);
    } else if piece.len() <= SCAN_LIMIT_BYTES {
        merge_by_scan(vocabulary, piece, &mut scratch.symbols, out);
    } else {
        merge_by_heap(vocabulary, piece, scratch, out);
    }
}

fn merge_by_scan(vocabulary: &Vocabulary, piece: &[u8], symbols: &mut Vec<Symbol>, out: &mut Vec<u32>) {
    let merge = |left: u32, right: u32| {
        vocabulary.merges.get(left, right).map_or((NO_MERGE, NONE), |merge| (merge.rank, merge.result))
    };
    symbols.clear();
    symbols.extend(piece.iter().map(|&byte| Symbol {
        id: vocabulary.byte_ids[usize::from(byte)],
        rank: NO_MERGE,
        result: NONE,
    }));
    for (symbol, pair) in symbols.iter_mut().zip(piece.windows(2)) {
        if let Some(merge) = vocabulary.merges.of_bytes(pair[0], pair[1]) {
            (symbol.rank, symbol.result) = (merge.rank, merge.result);
        }
    }
    while let Some((at, symbol)) = symbols.iter().copied().enumerate().min_by_key(|(_, symbol)| symbol.rank) {
        if symbol.rank == NO_MERGE {
            break;
        }
        symbols.remove(at + 1);
        symbols[at].id = symbol.result;
        (symbols[at].rank, symbols[at].result) =
            symbols.get(at + 1).map_or((NO_MERGE, NONE), |next| merge(symbol.result, next.id));
        if at > 0 {
            (symbols[at - 1].rank, symbols[at - 1].result) = merge(symbols[at - 1].id, symbol.result);
        }
    }
    out.extend(symbols.iter().map(|symbol| symbol.id));
}

fn merge_by_heap(vocabulary: &Vocabulary, piece: &[u8], scratch: &mut Scratch, out: &mut Vec<u32>) {
    let nodes = &mut scratch.nodes;
    nodes.clear();
    nodes.extend(piece.iter().enumerate().map(|(at, &byte)| Node {
        id: vocabulary.byte_ids[usize::from(byte)],
        previous: (at as u32).wrapping_sub(1),
        next: if at + 1 < piece.len() { at as u32 + 1 } else { NONE },
        rank: NO_MERGE,
        result: NONE,
    }));
    let mut pending = std::mem::take(&mut scratch.heap).into_vec();
    pending.clear();
    for (at, (node, pair)) in nodes.iter_mut().zip(piece.windows(2)).enumerate() {
        if let Some(merge) = vocabulary.merges.of_bytes(pair[0], pair[1]) {
            (node.rank, node.result) = (merge.rank, merge.result);
            pending.push(Reverse((merge.rank, at as u32)));
        }
    }
    let mut heap = BinaryHeap::from(pending);
    while let Some(Reverse((rank, at))) = heap.pop() {
        let node = nodes[at as usize];
        // Out of date: one side was joined with another neighbour since, which changed or removed the rank.
        if node.rank != rank {
            continue;
        }
        let gone = nodes[node.next as usize];
        nodes[node.next as usize].rank = NO_MERGE;
        nodes[at as usize].id = node.result;
        nodes[at as usize].next = gone.next;
        if gone.next != NONE {
            nodes[gone.next as usize].previous = at;
        }
        if let Some(rank) = refresh(vocabulary, nodes, at) {
            heap.push(Reverse((rank, at)));
        }
        if node.previous != NONE
            && let Some(rank) = refresh(vocabulary, nodes, node.previous)
        {
            heap.push(Reverse((rank, node.previous)));
        }
    }
    scratch.heap = heap;
    let mut at = 0;
    while at != NONE {
        let node = nodes[at as usize];
        out.push(node.id);
        at = node.next;
    }
    // A megabyte piece must not pin its working memory for the life of the thread.
    if nodes.capacity() > 1 << 16 {
        *scratch = Scratch::default();
    }
}

/// Looks up the merge of a node with its right neighbour again; its rank, if there is one.
fn refresh(vocabulary: &Vocabulary, nodes: &mut [Node], at: u32) -> Option<u32> {
    let node = nodes[at as usize];
    let merge =
        if node.next == NONE { None } else { vocabulary.merges.get(node.id, nodes[node.next as usize].id) };
    let node = &mut nodes[at as usize];
    (node.rank, node.result) = merge.map_or((NO_MERGE, NONE), |merge| (merge.rank, merge.result));
    merge.map(|merge| merge.rank)
}

#[cfg(test)]
mod tests;

use super::*;

fn decode(slot: usize, proposals: usize) -> Candidate {
    Candidate { slot, depth: 10, work: Work::Decode { proposals } }
}

fn prefill(slot: usize, ready: usize) -> Candidate {
    Candidate { slot, depth: 0, work: Work::Prefill { ready } }
}

const LIMITS: RowLimits = RowLimits { most: 512, mixed: 128, prefill: 400 };

fn rows(candidates: &[Candidate], limits: RowLimits) -> Vec<usize> {
    divide(candidates, Given::default(), limits).to_vec()
}

#[test]
fn whoever_decodes_is_served_first_and_prompts_share_what_is_left() {
    assert_eq!(rows(&[], LIMITS), [0; 0]);
    assert_eq!(rows(&[decode(0, 0), decode(1, 3)], LIMITS), [1, 4]);
    assert_eq!(rows(&[prefill(0, 1000)], LIMITS), [400]);
    assert_eq!(rows(&[prefill(0, 30), prefill(1, 1000), prefill(2, 1000)], LIMITS), [30, 185, 185]);
    // 128 rows in all where somebody decodes.
    assert_eq!(rows(&[decode(0, 7), prefill(1, 1000), prefill(2, 5)], LIMITS), [8, 115, 5]);
    assert_eq!(rows(&[decode(0, 7), prefill(1, 5), prefill(2, 1000)], LIMITS), [8, 5, 115]);
}

#[test]
fn at_the_limits() {
    let tight = RowLimits { most: 4, mixed: 1, prefill: 1 };
    // Proposals give way, the rows that texts need do not, and a prompt goes on by one row.
    assert_eq!(rows(&[decode(0, 9), decode(1, 0)], tight), [4, 0]);
    assert_eq!(rows(&[decode(0, 1), decode(1, 0), prefill(2, 9)], tight), [2, 1, 1]);
    assert_eq!(rows(&[decode(0, 1), decode(1, 1), prefill(2, 9)], tight), [2, 2, 0]);
    assert_eq!(rows(&[prefill(0, 9), prefill(1, 9)], tight), [1, 0]);
    assert_eq!(rows(&[prefill(0, 9), prefill(1, 9)], RowLimits { prefill: 9, ..tight }), [2, 2]);
}

#[test]
fn prompts_take_turns_at_the_front_and_texts_keep_their_rank() {
    let all = [prefill(0, 9), decode(1, 0), prefill(2, 9), decode(3, 0), prefill(4, 9)];
    let order = |turn| {
        let mut sorted: Candidates = all.into_iter().collect();
        sort(&mut sorted, turn);
        sorted.iter().map(|candidate| candidate.slot).collect::<Vec<_>>()
    };
    assert_eq!(order(0), [1, 3, 0, 2, 4]);
    assert_eq!(order(1), [1, 3, 2, 4, 0]);
    assert_eq!(order(5), [1, 3, 4, 0, 2]);
}

#[test]
fn what_one_could_not_take_goes_to_those_behind() {
    let all = [prefill(0, 1000), prefill(1, 1000), prefill(2, 1000)];
    let mut given = Given::default();
    assert_eq!(divide(&all, given, LIMITS).as_slice(), [134, 133, 133]);
    // The first took 10 of its rows only.
    given.note(&all[0], 10);
    assert_eq!(divide(&all[1..], given, LIMITS).as_slice(), [195, 195]);
    // Nobody decodes any more: the step is as long as one without.
    let mut given = Given::default();
    given.note(&decode(9, 0), 0);
    assert_eq!(divide(&all[1..], given, LIMITS).as_slice(), [200, 200]);
}

#[test]
fn no_step_is_longer_than_its_limits_and_no_row_is_lost() {
    let mut state = 7_u64;
    let mut below = |n: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % n
    };
    for _ in 0..5000 {
        let limits = RowLimits { most: 1 + below(600), mixed: 1 + below(200), prefill: 1 + below(500) };
        let mut all: Candidates = (0..below(17))
            .map(|slot| match below(2) {
                0 => decode(slot, below(16)),
                _ => prefill(slot, 1 + below(300)),
            })
            .collect();
        sort(&mut all, below(100));
        let rows = rows(&all, limits);
        assert_eq!(rows.len(), all.len());
        let (mut decoding, mut reading, mut wanted) = (0, 0, 0);
        for (candidate, &rows) in all.iter().zip(&rows) {
            match candidate.work {
                Work::Decode { proposals } => {
                    assert!(rows <= 1 + proposals);
                    decoding += rows;
                }
                Work::Prefill { ready } => {
                    assert!(rows <= ready);
                    reading += rows;
                    wanted += ready;
                }
            }
        }
        let budget = if decoding > 0 { limits.mixed.max(decoding + 1) } else { limits.prefill };
        let room = budget.min(limits.most).saturating_sub(decoding);
        assert!(decoding + reading <= limits.most);
        assert_eq!(reading, wanted.min(room), "{all:?} {limits:?} {rows:?}");
    }
}

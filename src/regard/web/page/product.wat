;; The product of two matrices whose rows are padded to multiples of 8 floats: y[r][o] = sum of x[r][i] * w[o][i].
;; For each row of w and each row of x, two accumulators of four floats each take the products in turn.
(module
  (import "m" "m" (memory 1))
  (func (export "f")
    (param $x i32) (param $rows i32) (param $w i32) (param $y i32)
    (param $stride i32) (param $outputs i32) ;; bytes of a padded row; rows of w
    (local $left i32) (local $row i32) (local $xp i32) (local $yp i32)
    (local $p i32) (local $q i32) (local $end i32) (local $span i32)
    (local $a v128) (local $b v128)
    local.get $outputs
    i32.const 2
    i32.shl
    local.set $span ;; bytes of a row of y
    local.get $outputs
    local.set $left
    loop $output
      local.get $x
      local.set $xp
      local.get $y
      local.set $yp
      local.get $rows
      local.set $row
      local.get $w
      local.get $stride
      i32.add
      local.set $end
      loop $input
        v128.const i32x4 0 0 0 0
        local.set $a
        v128.const i32x4 0 0 0 0
        local.set $b
        local.get $w
        local.set $p
        local.get $xp
        local.set $q
        loop $eight
          local.get $a
          local.get $p
          v128.load
          local.get $q
          v128.load
          f32x4.mul
          f32x4.add
          local.set $a
          local.get $b
          local.get $p
          v128.load offset=16
          local.get $q
          v128.load offset=16
          f32x4.mul
          f32x4.add
          local.set $b
          local.get $p
          i32.const 32
          i32.add
          local.set $p
          local.get $q
          i32.const 32
          i32.add
          local.set $q
          local.get $p
          local.get $end
          i32.lt_u
          br_if $eight
        end
        local.get $a
        local.get $b
        f32x4.add
        local.set $a
        local.get $yp
        local.get $a
        f32x4.extract_lane 0
        local.get $a
        f32x4.extract_lane 1
        f32.add
        local.get $a
        f32x4.extract_lane 2
        f32.add
        local.get $a
        f32x4.extract_lane 3
        f32.add
        f32.store
        local.get $xp
        local.get $stride
        i32.add
        local.set $xp
        local.get $yp
        local.get $span
        i32.add
        local.set $yp
        local.get $row
        i32.const 1
        i32.sub
        local.tee $row
        br_if $input
      end
      local.get $end
      local.set $w
      local.get $y
      i32.const 4
      i32.add
      local.set $y
      local.get $left
      i32.const 1
      i32.sub
      local.tee $left
      br_if $output
    end))

// libopapi.so of the simulated Ascend: the operators that torch_npu's own host code calls by the names of CANN. Their
// checks, their outputs and their gradients are torch_npu's; what is computed is written here, from CANN's published
// description of each operator. One that is not here is reported by torch_npu as "not in libopapi.so".
//
// Each operator has two functions: the first, ...GetWorkspaceSize, reads the arguments and leaves what is to be done in
// an executor; the second does it.
#include <ATen/ATen.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

struct aclTensor {
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  int64_t offset;
  int type;
  void* data;
};
struct aclScalar {
  char value[16];
  int type;
};
struct aclIntArray {
  std::vector<int64_t> values;
};
struct aclOpExecutor {
  std::function<void()> work;
};

namespace {

constexpr int kBadArgument = 161002;  // ACLNN_ERR_PARAM_INVALID

using at::Tensor;

at::ScalarType scalar_type(int type) {
  switch (type) {  // aclDataType
    case 0: return at::kFloat;
    case 1: return at::kHalf;
    case 2: return at::kChar;
    case 3: return at::kInt;
    case 4: return at::kByte;
    case 6: return at::kShort;
    case 9: return at::kLong;
    case 11: return at::kDouble;
    case 12: return at::kBool;
    case 27: return at::kBFloat16;
    default: TORCH_CHECK(false, "fake CANN: data type ", type, " is not simulated");
  }
}

Tensor on_host(const aclTensor* tensor) {
  if (tensor == nullptr) return {};
  const auto type = scalar_type(tensor->type);
  auto* first = static_cast<char*>(tensor->data) + tensor->offset * static_cast<int64_t>(c10::elementSize(type));
  return at::from_blob(first, tensor->shape, tensor->strides, at::TensorOptions().dtype(type));
}

at::Scalar number(const aclScalar* scalar) {
  return at::from_blob(const_cast<char*>(scalar->value), {}, at::TensorOptions().dtype(scalar_type(scalar->type))).item();
}

int plan(uint64_t* workspace, aclOpExecutor** executor, std::function<void()> work) {
  *workspace = 0;
  *executor = new aclOpExecutor{std::move(work)};
  return 0;
}

int refuse(const char* what) {
  std::fprintf(stderr, "fake CANN: %s\n", what);
  return kBadArgument;
}

int run(aclOpExecutor* executor) {
  int status = 0;
  try {
    const c10::impl::ExcludeDispatchKeyGuard without(c10::autograd_dispatch_keyset);
    executor->work();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fake CANN: %s\n", error.what());
    status = kBadArgument;
  }
  delete executor;
  return status;
}

void store(const Tensor& target, const Tensor& value) {
  if (target.defined() && target.numel() > 0) target.copy_(value.reshape(target.sizes()));
}

// The trailing dimensions that a weight of RMSNorm spans.
std::vector<int64_t> last(int64_t count, int64_t of) {
  std::vector<int64_t> found;
  for (int64_t i = of - count; i < of; i++) found.push_back(i);
  return found;
}

Tensor rotated(const Tensor& x, int64_t mode) {
  TORCH_CHECK(mode == 0 || mode == 1, "rotary mode ", mode, " is not simulated");
  if (mode == 0) {  // halves
    const auto halves = x.chunk(2, -1);
    return at::cat({-halves[1], halves[0]}, -1);
  }
  const auto pairs = x.unflatten(-1, {x.size(-1) / 2, 2});
  return at::stack({-pairs.select(-1, 1), pairs.select(-1, 0)}, -1).flatten(-2);
}

Tensor rotated_back(const Tensor& x, int64_t mode) { return -rotated(x, mode); }

// ---- Attention -----------------------------------------------------------------------------------------------------

struct Attention {
  Tensor q, k, v;
  Tensor mask;  // true: hidden
  double scale;
  int64_t before, after;
  int64_t heads;
  std::string layout;
  int64_t mode;

  // [batch, heads, length, width]
  Tensor spread(const Tensor& x, int64_t count) const {
    if (layout == "BNSD") return x;
    if (layout == "BSND") return x.transpose(1, 2);
    if (layout == "BSH") return x.unflatten(-1, {count, x.size(-1) / count}).transpose(1, 2);
    if (layout == "SBH") return x.unflatten(-1, {count, x.size(-1) / count}).permute({1, 2, 0, 3});
    TORCH_CHECK(false, "attention layout ", layout, " is not simulated");
  }

  Tensor gathered(const Tensor& x) const {
    if (layout == "BNSD") return x;
    if (layout == "BSND") return x.transpose(1, 2);
    if (layout == "BSH") return x.transpose(1, 2).flatten(2);
    return x.permute({2, 0, 1, 3}).flatten(2);
  }

  int64_t kv_heads() const {
    if (layout == "BNSD") return k.size(1);
    if (layout == "BSND") return k.size(2);
    const int64_t width = q.size(-1) / heads;
    return k.size(-1) / width;
  }

  Tensor hidden(int64_t queries, int64_t keys) const {
    if (!mask.defined()) return {};
    if (mode == 0 || mode == 1) {
      Tensor whole = mask.to(at::kBool);
      TORCH_CHECK(whole.size(-2) == queries && whole.size(-1) == keys, "the mask covers ", whole.sizes(), ", not ",
                  queries, " x ", keys);
      return whole;
    }
    TORCH_CHECK(mask.size(-2) == 2048 && mask.size(-1) == 2048, "sparse mode ", mode, " wants a mask of 2048 x 2048");
    const Tensor expected = at::ones({2048, 2048}, at::kBool).triu(1);
    TORCH_CHECK(at::equal(mask.to(at::kBool).reshape({2048, 2048}), expected), "the compressed mask is not a triangle");
    const Tensor row = at::arange(queries).unsqueeze(1);
    const Tensor column = at::arange(keys).unsqueeze(0);
    const int64_t shift = keys - queries;
    if (mode == 2) return column > row;
    if (mode == 3) return column > row + shift;
    if (mode == 4) return (column > row + shift + after) | (column < row + shift - before);
    TORCH_CHECK(false, "sparse mode ", mode, " is not simulated");
  }

  Tensor scores() const {
    const int64_t groups = heads / kv_heads();
    const Tensor keys = spread(k, kv_heads()).repeat_interleave(groups, 1);
    Tensor found = at::matmul(spread(q, heads).to(at::kFloat), keys.to(at::kFloat).transpose(-1, -2)) * scale;
    const Tensor gone = hidden(found.size(-2), found.size(-1));
    return gone.defined() ? found.masked_fill(gone, -std::numeric_limits<float>::infinity()) : found;
  }

  void forward(const Tensor& max_out, const Tensor& sum_out, const Tensor& out) const {
    const int64_t groups = heads / kv_heads();
    const Tensor all = scores();
    Tensor max = all.amax(-1, true);
    max = at::where(max.isinf(), at::zeros_like(max), max);
    const Tensor powers = (all - max).exp();
    const Tensor sum = powers.sum(-1, true);
    const Tensor values = spread(v, kv_heads()).repeat_interleave(groups, 1).to(at::kFloat);
    const Tensor found = at::matmul(powers / sum.clamp_min(1e-38), values);
    store(max_out, max.expand({-1, -1, -1, 8}));
    store(sum_out, sum.expand({-1, -1, -1, 8}));
    store(out, gathered(found.to(q.scalar_type())));
  }

  // From the row maxima, the row sums and the output of the forward pass, as flash attention keeps them.
  void backward(const Tensor& dy, const Tensor& max, const Tensor& sum, const Tensor& out, const Tensor& dq,
                const Tensor& dk, const Tensor& dv) const {
    const int64_t kv = kv_heads();
    const int64_t groups = heads / kv;
    const Tensor weights = (scores() - max.narrow(-1, 0, 1)).exp() / sum.narrow(-1, 0, 1).clamp_min(1e-38);
    const Tensor grad = spread(dy, heads).to(at::kFloat);
    const Tensor values = spread(v, kv).repeat_interleave(groups, 1).to(at::kFloat);
    const Tensor keys = spread(k, kv).repeat_interleave(groups, 1).to(at::kFloat);
    const Tensor inner = (grad * spread(out, heads).to(at::kFloat)).sum(-1, true);
    const Tensor dscores = weights * (at::matmul(grad, values.transpose(-1, -2)) - inner) * scale;
    const auto pooled = [&](const Tensor& x) { return x.unflatten(1, {kv, groups}).sum(2).to(q.scalar_type()); };
    store(dq, gathered(at::matmul(dscores, keys).to(q.scalar_type())));
    store(dk, gathered(pooled(at::matmul(dscores.transpose(-1, -2), spread(q, heads).to(at::kFloat)))));
    store(dv, gathered(pooled(at::matmul(weights.transpose(-1, -2), grad))));
  }
};

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))
#define EXECUTES(name) \
  EXPORT int name(void*, uint64_t, aclOpExecutor* executor, void*) { return run(executor); }

// ---- Objects -------------------------------------------------------------------------------------------------------

EXPORT aclTensor* aclCreateTensor(const int64_t* shape, uint64_t dims, int type, const int64_t* strides, int64_t offset,
                                  int, const int64_t*, uint64_t, void* data) {
  return new aclTensor{{shape, shape + dims}, {strides, strides + dims}, offset, type, data};
}
EXPORT int aclDestroyTensor(const aclTensor* tensor) {
  delete tensor;
  return 0;
}
EXPORT aclScalar* aclCreateScalar(void* value, int type) {
  auto* made = new aclScalar{{}, type};
  std::memcpy(made->value, value, c10::elementSize(scalar_type(type)));
  return made;
}
EXPORT int aclDestroyScalar(const aclScalar* scalar) {
  delete scalar;
  return 0;
}
EXPORT aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t count) {
  return new aclIntArray{{values, values + count}};
}
EXPORT int aclDestroyIntArray(const aclIntArray* array) {
  delete array;
  return 0;
}

// ---- What torch_npu's storage code calls ---------------------------------------------------------------------------

EXPORT int aclnnInplaceZeroGetWorkspaceSize(const aclTensor* x, uint64_t* workspace, aclOpExecutor** executor) {
  return plan(workspace, executor, [x = on_host(x)] { x.zero_(); });
}
EXECUTES(aclnnInplaceZero)

EXPORT int aclnnInplaceOneGetWorkspaceSize(const aclTensor* x, uint64_t* workspace, aclOpExecutor** executor) {
  return plan(workspace, executor, [x = on_host(x)] { x.fill_(1); });
}
EXECUTES(aclnnInplaceOne)

EXPORT int aclnnInplaceFillScalarGetWorkspaceSize(const aclTensor* x, const aclScalar* value, uint64_t* workspace,
                                                  aclOpExecutor** executor) {
  return plan(workspace, executor, [x = on_host(x), value = number(value)] { x.fill_(value); });
}
EXECUTES(aclnnInplaceFillScalar)

EXPORT int aclnnInplaceCopyGetWorkspaceSize(const aclTensor* to, const aclTensor* from, uint64_t* workspace,
                                            aclOpExecutor** executor) {
  return plan(workspace, executor, [to = on_host(to), from = on_host(from)] { to.copy_(from); });
}
EXECUTES(aclnnInplaceCopy)

EXPORT int aclnnCastGetWorkspaceSize(const aclTensor* from, int, const aclTensor* to, uint64_t* workspace,
                                     aclOpExecutor** executor) {
  return plan(workspace, executor, [to = on_host(to), from = on_host(from)] { to.copy_(from); });
}
EXECUTES(aclnnCast)

EXPORT int aclnnConstantPadNdGetWorkspaceSize(const aclTensor* x, const aclIntArray* pad, const aclScalar* value,
                                              const aclTensor* out, uint64_t* workspace, aclOpExecutor** executor) {
  return plan(workspace, executor, [x = on_host(x), pad = pad->values, value = number(value), out = on_host(out)] {
    store(out, at::constant_pad_nd(x, pad, value));
  });
}
EXECUTES(aclnnConstantPadNd)

// ---- The product that torch_npu's own backward pass of matmul calls -------------------------------------------------

EXPORT int aclnnMatmulGetWorkspaceSize(const aclTensor* a, const aclTensor* b, const aclTensor* out, int8_t,
                                       uint64_t* workspace, aclOpExecutor** executor) {
  return plan(workspace, executor,
              [a = on_host(a), b = on_host(b), out = on_host(out)] { store(out, at::matmul(a, b)); });
}
EXECUTES(aclnnMatmul)

// ---- RMSNorm, arXiv:1910.07467 -------------------------------------------------------------------------------------

EXPORT int aclnnRmsNormGetWorkspaceSize(const aclTensor* x, const aclTensor* weight, double epsilon,
                                        const aclTensor* out, const aclTensor* rstd, uint64_t* workspace,
                                        aclOpExecutor** executor) {
  if (x->shape.empty() || weight->shape.empty() || weight->shape.back() != x->shape.back()) {
    return refuse("RmsNorm: the weight is not as wide as x");
  }
  return plan(workspace, executor,
              [x = on_host(x), weight = on_host(weight), epsilon, out = on_host(out), rstd = on_host(rstd)] {
                const Tensor wide = x.to(at::kFloat);
                const Tensor factor = (wide.pow(2).mean(last(weight.dim(), x.dim()), true) + epsilon).rsqrt();
                store(out, (wide * factor * weight.to(at::kFloat)).to(out.scalar_type()));
                store(rstd, factor);
              });
}
EXECUTES(aclnnRmsNorm)

EXPORT int aclnnRmsNormGradGetWorkspaceSize(const aclTensor* dy, const aclTensor* x, const aclTensor* rstd,
                                            const aclTensor* weight, const aclTensor* dx, const aclTensor* dweight,
                                            uint64_t* workspace, aclOpExecutor** executor) {
  return plan(workspace, executor,
              [dy = on_host(dy), x = on_host(x), rstd = on_host(rstd), weight = on_host(weight), dx = on_host(dx),
               dweight = on_host(dweight)] {
                const auto dims = last(weight.dim(), x.dim());
                std::vector<int64_t> outer;
                for (int64_t i = 0; i < x.dim() - weight.dim(); i++) outer.push_back(i);
                std::vector<int64_t> shape = x.sizes().vec();
                for (const int64_t dim : dims) shape[dim] = 1;
                const Tensor factor = rstd.reshape(shape);
                const Tensor normed = x.to(at::kFloat) * factor;
                const Tensor grad = dy.to(at::kFloat);
                const Tensor inner = grad * weight.to(at::kFloat);
                store(dx, (factor * (inner - normed * (inner * normed).mean(dims, true))).to(dx.scalar_type()));
                store(dweight, outer.empty() ? grad * normed : (grad * normed).sum(outer));
              });
}
EXECUTES(aclnnRmsNormGrad)

// ---- SwiGLU, arXiv:2002.05202 --------------------------------------------------------------------------------------

EXPORT int aclnnSwiGluGetWorkspaceSize(const aclTensor* x, int64_t dim, const aclTensor* out, uint64_t* workspace,
                                       aclOpExecutor** executor) {
  return plan(workspace, executor, [x = on_host(x), dim, out = on_host(out)] {
    const auto halves = x.to(at::kFloat).chunk(2, dim);
    store(out, (at::silu(halves[0]) * halves[1]).to(out.scalar_type()));
  });
}
EXECUTES(aclnnSwiGlu)

EXPORT int aclnnSwiGluGradGetWorkspaceSize(const aclTensor* dy, const aclTensor* x, int64_t dim, const aclTensor* dx,
                                           uint64_t* workspace, aclOpExecutor** executor) {
  return plan(workspace, executor, [dy = on_host(dy), x = on_host(x), dim, dx = on_host(dx)] {
    const auto halves = x.to(at::kFloat).chunk(2, dim);
    const Tensor grad = dy.to(at::kFloat);
    const Tensor gate = at::sigmoid(halves[0]);
    const Tensor slope = gate * (1 + halves[0] * (1 - gate));
    store(dx, at::cat({grad * halves[1] * slope, grad * halves[0] * gate}, dim).to(dx.scalar_type()));
  });
}
EXECUTES(aclnnSwiGluGrad)

// ---- Rotary embedding, arXiv:2104.09864 ----------------------------------------------------------------------------

EXPORT int aclnnRotaryPositionEmbeddingGetWorkspaceSize(const aclTensor* x, const aclTensor* cos, const aclTensor* sin,
                                                        int64_t mode, const aclTensor* out, uint64_t* workspace,
                                                        aclOpExecutor** executor) {
  if (x->shape.size() != 4 || cos->shape.size() != 4 || sin->shape != cos->shape) {
    return refuse("RotaryPositionEmbedding: x, cos and sin have four dimensions");
  }
  return plan(workspace, executor, [x = on_host(x), cos = on_host(cos), sin = on_host(sin), mode, out = on_host(out)] {
    store(out, (x * cos + rotated(x, mode) * sin).to(out.scalar_type()));
  });
}
EXECUTES(aclnnRotaryPositionEmbedding)

EXPORT int aclnnRotaryPositionEmbeddingGradGetWorkspaceSize(const aclTensor* dy, const aclTensor* cos,
                                                            const aclTensor* sin, const aclTensor* x, int64_t mode,
                                                            const aclTensor* dx, const aclTensor* dcos,
                                                            const aclTensor* dsin, uint64_t* workspace,
                                                            aclOpExecutor** executor) {
  return plan(workspace, executor,
              [dy = on_host(dy), cos = on_host(cos), sin = on_host(sin), x = on_host(x), mode, dx = on_host(dx),
               dcos = on_host(dcos), dsin = on_host(dsin)] {
                store(dx, (dy * cos + rotated_back(dy * sin, mode)).to(dx.scalar_type()));
                if (!x.defined()) return;
                if (dcos.defined()) store(dcos, (dy * x).sum_to_size(cos.sizes()));
                if (dsin.defined()) store(dsin, (dy * rotated(x, mode)).sum_to_size(sin.sizes()));
              });
}
EXECUTES(aclnnRotaryPositionEmbeddingGrad)

// ---- Flash attention, arXiv:2205.14135 -----------------------------------------------------------------------------

EXPORT int aclnnFlashAttentionScoreGetWorkspaceSize(
    const aclTensor* q, const aclTensor* k, const aclTensor* v, const aclTensor* shift, const aclTensor* dropped,
    const aclTensor* padding, const aclTensor* mask, const aclIntArray* prefix, double scale, double keep,
    int64_t before, int64_t after, int64_t heads, char* layout, int64_t, int64_t mode, const aclTensor* max,
    const aclTensor* sum, const aclTensor*, const aclTensor* out, uint64_t* workspace, aclOpExecutor** executor) {
  if (shift != nullptr || padding != nullptr || (prefix != nullptr && !prefix->values.empty())) {
    return refuse("FlashAttentionScore: pse, padding masks and prefixes are not simulated");
  }
  if (dropped != nullptr || keep != 1.0) return refuse("FlashAttentionScore: dropout is not simulated");
  const Attention job{on_host(q), on_host(k), on_host(v), on_host(mask), scale, before, after, heads, layout, mode};
  return plan(workspace, executor,
              [job, max = on_host(max), sum = on_host(sum), out = on_host(out)] { job.forward(max, sum, out); });
}
EXECUTES(aclnnFlashAttentionScore)

EXPORT int aclnnFlashAttentionScoreGradGetWorkspaceSize(
    const aclTensor* q, const aclTensor* k, const aclTensor* v, const aclTensor* dy, const aclTensor* shift,
    const aclTensor* dropped, const aclTensor* padding, const aclTensor* mask, const aclTensor* max,
    const aclTensor* sum, const aclTensor*, const aclTensor* out, const aclIntArray* prefix, double scale, double keep,
    int64_t before, int64_t after, int64_t heads, char* layout, int64_t, int64_t mode, const aclTensor* dq,
    const aclTensor* dk, const aclTensor* dv, const aclTensor*, uint64_t* workspace, aclOpExecutor** executor) {
  if (shift != nullptr || padding != nullptr || (prefix != nullptr && !prefix->values.empty())) {
    return refuse("FlashAttentionScoreGrad: pse, padding masks and prefixes are not simulated");
  }
  if (dropped != nullptr || keep != 1.0) return refuse("FlashAttentionScoreGrad: dropout is not simulated");
  const Attention job{on_host(q), on_host(k), on_host(v), on_host(mask), scale, before, after, heads, layout, mode};
  return plan(workspace, executor,
              [job, dy = on_host(dy), max = on_host(max), sum = on_host(sum), out = on_host(out), dq = on_host(dq),
               dk = on_host(dk), dv = on_host(dv)] { job.backward(dy, max, sum, out, dq, dk, dv); });
}
EXECUTES(aclnnFlashAttentionScoreGrad)
